"""`millrace chat`: a conversation in the terminal, with a model in this process or on any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from millrace.errors import MillraceError
from millrace.params import SamplingParams
from millrace.terminal.conversation import Conversation, run_slash
from millrace.terminal.sampling_options import AnswerStats, add_sampling, sampling_params
from millrace.terminal.settings_options import add_model, add_settings, load_settings

USAGE = "millrace chat [MODEL] [--url URL] [options]"
EXAMPLES = """\
in the chat:
  /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves

examples:
  millrace chat                                     the default model, in this process
  millrace chat qwen2.5-coder-1.5b --system "You write short Python."
  millrace chat --url http://127.0.0.1:8000         any OpenAI-compatible server
  millrace chat --temperature 0 --max-tokens 200"""


class Backend(Protocol):
    """Where answers come from. Closing the iterator before its end stops the generation."""

    model_name: str
    last: AnswerStats

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Iterator[str]: ...

    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--url", default="", help="talk to this server instead of loading a model")
    parser.add_argument("--api-key", default="", help="the key that the server wants")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    add_sampling(parser, max_tokens=None)
    add_settings(parser, sections=("model", "memory", "run", "plan", "observe"), taken=("seed",))


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    loaded = load_settings(args)
    backend: Backend
    if args.url:
        from millrace.terminal.remote_backend import RemoteBackend

        named = loaded.config.model.source if loaded.sources["model.source"] != "default" else ""
        backend = RemoteBackend(args.url, named, args.api_key)
    else:
        from millrace.terminal.local_backend import LocalBackend

        backend = LocalBackend(loaded.config)
    try:
        Chat(backend, Conversation(args.system), params).loop()
    finally:
        backend.close()
    return 0


class Chat:
    """The loop between a person and a backend."""

    def __init__(self, backend: Backend, conversation: Conversation, params: SamplingParams) -> None:
        self._backend = backend
        self._conversation = conversation
        self._params = params
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def loop(self) -> None:
        self._say(f"Chatting with {self._backend.model_name}. /help lists commands, Ctrl-D leaves.")
        if self._on_terminal:
            import readline  # noqa: F401 - importing it gives input() its editing and its history
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
                self._say("\nCtrl-C again leaves; so does /exit.")
                continue
            interrupted = False
            if not self._handle(line):
                return

    def _read(self) -> str:
        # readline counts the columns of a prompt; \001 and \002 fence off what takes none.
        prompt = "\001\033[1;36m\002you ›\001\033[0m\002 " if self._on_terminal else ""
        lines = [input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("  … " if self._on_terminal else ""))
        return "\n".join(lines).strip()

    def _handle(self, line: str) -> bool:
        """Act on one line; False ends the chat."""
        if not line:
            return True
        if line.startswith("/"):
            stats = self._backend.last
            reply = run_slash(line, self._conversation, stats.sentence() if stats.total_s else "")
            if reply.text:
                self._say(reply.text)
            if reply.answer_again:
                self._answer()
            return not reply.leave
        self._conversation.ask(line)
        self._answer()
        return True

    def _answer(self) -> None:
        """Stream one answer. What came before a Ctrl-C or an error stays in the conversation, as the person saw it."""
        pieces: list[str] = []
        stream = self._backend.stream_chat(self._conversation.messages, self._params)
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            self._say("\n(stopped)")
        except MillraceError as error:
            self._say(f"\n{error.message}" if pieces else error.message, colour="\033[31m")
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        self._conversation.answered("".join(pieces))

    def _say(self, text: str, colour: str = "\033[2m") -> None:
        """Our own words, told apart from the model's."""
        print(f"{colour}{text}\033[0m" if self._on_terminal else text, flush=True)
