"""`millrace chat`: a conversation in the terminal, with a model in this process or on any OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millrace.config import LoadedConfig
from millrace.terminal.sampling_options import add_sampling, sampling_fields
from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_model, add_settings, load_settings

if TYPE_CHECKING:
    from millrace.terminal.backend import Backend

USAGE = "millrace chat [MODEL] [--url URL] [options]"
EXAMPLES = """\
in the chat:
  /help lists the commands; Ctrl-C stops an answer; Ctrl-D exits

examples:
  millrace chat                                     the default model, in this process
  millrace chat qwen2.5-coder-1.5b --system "You write short Python."
  millrace chat --url http://127.0.0.1:8000         any OpenAI-compatible server
  millrace chat --temperature 0 --max-tokens 200"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--url", default="", help="use this server instead of loading a model")
    parser.add_argument("--api-key", default="", help="API key for the server (default: MILLRACE_API_KEY)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--plain", action="store_true", help="show answers as they come, without rendering Markdown")
    parser.set_defaults(finds_server=False)
    add_sampling(parser, max_tokens=None)
    add_settings(
        parser, sections=("model", "memory", "run", "plan", "observe"), taken=("seed",), shown=LOCAL_MODEL_SETTINGS
    )


def run(args: argparse.Namespace) -> int:
    from millrace.config import client_api_key, replace
    from millrace.terminal.backend import open_backend
    from millrace.terminal.chat.conversation import Conversation
    from millrace.terminal.chat.screen import ChatScreen

    fields = sampling_fields(args)
    loaded = load_settings(args)
    api_key = args.api_key or client_api_key()

    def open_model(name: str) -> Backend:
        named = LoadedConfig(
            replace(loaded.config, model__source=name), {**loaded.sources, "model.source": "command line"}
        )
        return open_backend(named, args.url, api_key, finds_server=args.finds_server)

    backend = open_backend(loaded, args.url, api_key, finds_server=args.finds_server)
    screen = ChatScreen(backend, Conversation(args.system), fields, open_backend=open_model, plain=args.plain)
    try:
        has_failed = screen.loop()
    finally:
        screen.backend.close()
    return 1 if has_failed and not screen.is_on_terminal else 0
