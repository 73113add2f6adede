"""The chat loop: reads turns, runs slash commands, streams answers."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.errors import MillraceError
from millrace.terminal.backend import Backend
from millrace.terminal.chat.conversation import Conversation, Reply, run_slash
from millrace.terminal.chat.markdown import MarkdownStream
from millrace.terminal.chat.reader import TurnReader, without_echo
from millrace.terminal.colour import DIM, RED, coloured, wants_colour
from millrace.terminal.sampling_options import AnswerStats, SamplingFields

OpenBackend = Callable[[str], Backend]
"""Opens the backend of another model, by name."""


class ChatScreen:
    def __init__(
        self,
        backend: Backend,
        conversation: Conversation,
        fields: SamplingFields,
        *,
        open_backend: OpenBackend,
        plain: bool = False,
    ) -> None:
        self.backend = backend
        self._conversation = conversation
        self._fields = dict(fields)
        self._open_backend = open_backend
        self.is_on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._has_failed = False
        self._renders = self.is_on_terminal and not plain

    def loop(self) -> bool:
        """Chat until the end of the input. True if an answer or a change of the model failed."""
        self._say(f"Chatting with {self.backend.model_name}. Type /help for commands, Ctrl-D to exit.")
        reader = TurnReader(on_terminal=self.is_on_terminal)
        try:
            self._loop(reader)
        finally:
            reader.close()
        return self._has_failed

    def _loop(self, reader: TurnReader) -> None:
        interrupted = False
        while True:
            try:
                turn = reader.read()
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
            if not self._handle(turn):
                return

    def _handle(self, turn: str) -> bool:
        """Act on one turn; False ends the chat."""
        if not turn:
            return True
        if not turn.startswith("/") or "\n" in turn:
            self._conversation.add_user_message(turn)
            self._answer()
            return True
        stats = self.backend.last
        summary = stats.summary() if stats.total_s else ""
        reply = run_slash(turn, self._conversation, self._fields, self.backend.model_name, summary)
        if reply.text:
            self._say(reply.text)
        if reply.model:
            self._switch(reply)
        if reply.image:
            self._attach(Path(reply.image).expanduser())
        if reply.answer_again:
            self._answer()
        return not reply.leave

    def _attach(self, path: Path) -> None:
        if self.backend.takes_images():
            self._say(self._conversation.attach(path))
        else:
            self._fail(f"{self.backend.model_name} takes no images, so {path.name} is not attached.")

    def _switch(self, reply: Reply) -> None:
        """Open another model; the conversation goes on with it. If that fails, the present one stays."""
        before = self.backend
        try:
            self.backend = self._open_backend(reply.model)
        except MillraceError as error:
            self._fail(error.message)
            return
        before.close()
        self._say(f"Now chatting with {self.backend.model_name}. /clear starts a new conversation.")

    def _answer(self) -> None:
        """Stream one answer. Text shown before a Ctrl-C or an error stays in the conversation."""
        pieces: list[str] = []
        stream = self.backend.stream_chat(self._conversation.messages, self._fields)
        try:
            with without_echo(on_terminal=self.is_on_terminal), contextlib.closing(stream) as parts:
                self._show(parts, pieces)
            self._say_speed(self.backend.last)
        except KeyboardInterrupt:
            self._say("\n(stopped)")
        except MillraceError as error:
            self._fail(f"\n{error.message}" if pieces else error.message)
        self._conversation.add_answer("".join(pieces))

    def _show(self, parts: Iterator[str], pieces: list[str]) -> None:
        if not self._renders:
            for piece in parts:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
            return
        output = MarkdownStream(_write_now, shutil.get_terminal_size().columns - 1, colour=wants_colour(sys.stdout))
        for piece in parts:
            pieces.append(piece)
            output.feed(piece)
        output.finish()

    def _say_speed(self, stats: AnswerStats) -> None:
        if self.is_on_terminal and stats.output_tokens:
            speed = f", {stats.tokens_per_s:.1f} tokens/s" if stats.tokens_per_s else ""
            self._say(f"[{stats.output_tokens} tokens{speed}, first after {stats.first_token_s:.2f} s]")

    def _fail(self, text: str) -> None:
        """Without a terminal errors go to standard error, apart from the answers."""
        self._has_failed = True
        if self.is_on_terminal:
            self._say(text, colour=RED)
        else:
            print(text, file=sys.stderr, flush=True)

    def _say(self, text: str, colour: str = DIM) -> None:
        """Our own messages, set apart from the model's text."""
        print(coloured(text, colour, sys.stdout) if self.is_on_terminal else text, flush=True)


def _write_now(text: str) -> None:
    print(text, end="", flush=True)
