"""`millrace generate`: one prompt in, text streamed to standard output, nothing else on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from millrace.commands.chat import Backend
from millrace.params import SamplingParams
from millrace.terminal.parser import UsageError
from millrace.terminal.sampling_options import add_sampling, sampling_params
from millrace.terminal.settings_options import add_settings, load_settings

USAGE = "millrace generate PROMPT [--chat] [--model MODEL] [options]"
EXAMPLES = """\
examples:
  millrace generate "The sea is" --max-tokens 32
  millrace generate --chat "Why is the sky blue?" --temperature 0
  cat notes.txt | millrace generate - --chat --system "Summarise this."
  millrace generate "def fib(n):" --model qwen2.5-coder-1.5b --json"""


class TextBackend(Backend, Protocol):
    def stream_text(self, prompt: str, params: SamplingParams) -> Iterator[str]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on from; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the prompt as it stands (default)")
    form.add_argument("--chat", action="store_true", help="ask the prompt as a question, through the chat template")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt, with --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("--url", default="", help="ask this OpenAI-compatible server instead of loading a model")
    parser.add_argument("--api-key", default="", help="the key that the server wants")
    add_sampling(parser, max_tokens=256)
    add_settings(parser, sections=("model", "memory", "run", "plan", "observe"), taken=("seed",))


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    loaded = load_settings(args)
    if args.system and not args.chat:
        raise UsageError("--system belongs to --chat; add --chat or leave it out.")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise UsageError("The prompt is empty; give at least one character.")
    backend: TextBackend
    if args.url:
        from millrace.terminal.remote_backend import RemoteBackend

        named = loaded.config.model.source if loaded.sources["model.source"] != "default" else ""
        backend = RemoteBackend(args.url, named, args.api_key)
    else:
        from millrace.terminal.local_backend import LocalBackend

        backend = LocalBackend(loaded.config)
    try:
        return _generate(backend, prompt, params, args)
    finally:
        backend.close()


def _generate(backend: TextBackend, prompt: str, params: SamplingParams, args: argparse.Namespace) -> int:
    messages = _messages(prompt, args.system)
    stream = backend.stream_chat(messages, params) if args.chat else backend.stream_text(prompt, params)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)
    if args.json:
        stats = {
            name: round(x, 4) if isinstance(x, float) else x for name, x in dataclasses.asdict(backend.last).items()
        }
        print(json.dumps({"model": backend.model_name, "text": "".join(pieces), **stats}, ensure_ascii=False))
    else:
        print()
    return 0


def _messages(prompt: str, system: str) -> Sequence[Mapping[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]
