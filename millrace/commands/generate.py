"""`millrace generate`: completes one prompt and streams the text, and nothing else, to standard output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError
from millrace.terminal.sampling_options import add_sampling, sampling_fields
from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_settings, load_settings

if TYPE_CHECKING:
    from millrace.terminal.backend import Backend
    from millrace.terminal.sampling_options import SamplingFields

USAGE = "millrace generate PROMPT [--chat] [--model MODEL] [options]"
EXAMPLES = """\
examples:
  millrace generate "The sea is" --max-tokens 32
  millrace generate --chat "Why is the sky blue?" --temperature 0
  cat notes.txt | millrace generate - --chat --system "Summarise this."
  millrace generate "def fib(n):" --model qwen2.5-coder-1.5b --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt to continue; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the prompt as it is (default)")
    form.add_argument("--chat", action="store_true", help="send the prompt as a user message, with the chat template")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt (with --chat)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("--url", default="", help="use this OpenAI-compatible server instead of loading a model")
    parser.add_argument("--api-key", default="", help="API key for the server (default: MILLRACE_API_KEY)")
    parser.set_defaults(finds_server=False)
    add_sampling(parser, max_tokens=256)
    add_settings(
        parser, sections=("model", "memory", "run", "plan", "observe"), taken=("seed",), shown=LOCAL_MODEL_SETTINGS
    )


def run(args: argparse.Namespace) -> int:
    from millrace.config import client_api_key
    from millrace.terminal.backend import open_backend

    fields = sampling_fields(args)
    loaded = load_settings(args)
    if args.system and not args.chat:
        raise UsageError("--system needs --chat.")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise UsageError("The prompt is empty.")
    api_key = args.api_key or client_api_key()
    backend = open_backend(loaded, args.url, api_key, finds_server=args.finds_server)
    try:
        return _generate(backend, prompt, fields, args)
    finally:
        backend.close()


def _generate(backend: Backend, prompt: str, fields: SamplingFields, args: argparse.Namespace) -> int:
    messages = _messages(prompt, args.system)
    stream = backend.stream_chat(messages, fields) if args.chat else backend.stream_text(prompt, fields)
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
