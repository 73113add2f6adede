"""`millrace chat`: a conversation in the terminal, with a model in this process or on any OpenAI-compatible server."""

from __future__ import annotations

import argparse

from millrace.terminal.sampling_options import add_sampling, sampling_fields
from millrace.terminal.settings_options import LOCAL_MODEL_SETTINGS, add_model, add_settings, load_settings

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
    parser.add_argument("--api-key", default="", help="API key for the server")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    add_sampling(parser, max_tokens=None)
    add_settings(
        parser, sections=("model", "memory", "run", "plan", "observe"), taken=("seed",), shown=LOCAL_MODEL_SETTINGS
    )


def run(args: argparse.Namespace) -> int:
    from millrace.terminal.backend import open_backend
    from millrace.terminal.chat_screen import ChatScreen
    from millrace.terminal.conversation import Conversation

    fields = sampling_fields(args)
    backend = open_backend(load_settings(args), args.url, args.api_key)
    try:
        ChatScreen(backend, Conversation(args.system), fields).loop()
    finally:
        backend.close()
    return 0
