"""The chat loop: reads lines, runs slash commands, streams answers."""

from __future__ import annotations

import sys

from millrace.errors import MillraceError
from millrace.terminal.backend import Backend
from millrace.terminal.colour import BOLD_CYAN, DIM, PLAIN, RED, coloured, wants_colour
from millrace.terminal.conversation import Conversation, run_slash
from millrace.terminal.sampling_options import SamplingFields


class ChatScreen:
    def __init__(self, backend: Backend, conversation: Conversation, fields: SamplingFields) -> None:
        self._backend = backend
        self._conversation = conversation
        self._fields = fields
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def loop(self) -> None:
        self._say(f"Chatting with {self._backend.model_name}. Type /help for commands, Ctrl-D to exit.")
        if self._on_terminal:
            import readline  # noqa: F401 - importing it gives input() line editing and history
        interrupted = False
        while True:
            try:
                line = self._read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                if interrupted:
                    print()
                    return
                interrupted = True
                self._say("\nPress Ctrl-C again to exit, or type /exit.")
                continue
            interrupted = False
            if not self._handle(line):
                return

    def _read(self) -> str:
        lines = [input(self._prompt())]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("  … " if self._on_terminal else ""))
        return "\n".join(lines).strip()

    def _prompt(self) -> str:
        if not self._on_terminal:
            return ""
        if not wants_colour(sys.stdout):
            return "you › "
        # \001 and \002 tell readline that the escapes between them take no columns.
        return f"\001{BOLD_CYAN}\002you ›\001{PLAIN}\002 "

    def _handle(self, line: str) -> bool:
        """Act on one line; False ends the chat."""
        if not line:
            return True
        if line.startswith("/"):
            stats = self._backend.last
            reply = run_slash(line, self._conversation, stats.summary() if stats.total_s else "")
            if reply.text:
                self._say(reply.text)
            if reply.answer_again:
                self._answer()
            return not reply.leave
        self._conversation.add_user_message(line)
        self._answer()
        return True

    def _answer(self) -> None:
        """Stream one answer. Text shown before a Ctrl-C or an error stays in the conversation."""
        pieces: list[str] = []
        stream = self._backend.stream_chat(self._conversation.messages, self._fields)
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            self._say("\n(stopped)")
        except MillraceError as error:
            self._say(f"\n{error.message}" if pieces else error.message, colour=RED)
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        self._conversation.add_answer("".join(pieces))

    def _say(self, text: str, colour: str = DIM) -> None:
        """Our own messages, set apart from the model's text."""
        print(coloured(text, colour, sys.stdout) if self._on_terminal else text, flush=True)
