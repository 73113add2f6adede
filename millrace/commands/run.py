"""`millrace run MODEL`: downloads the model if needed and chats with it, or answers one prompt."""

from __future__ import annotations

import argparse

from millrace.commands import chat, generate

USAGE = "millrace run MODEL [PROMPT] [options]"
EXAMPLES = """\
examples:
  millrace run llama3.2-1b                              chat
  millrace run llama3.2-1b "Why is the sky blue?"       one answer, then exit
  echo "A long text" | millrace run smollm2 --system "Summarise this." -"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chat.add_arguments(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and exit; - reads standard input")
    parser.add_argument("--json", action="store_true", help="with PROMPT: print one JSON object instead of the text")


def run(args: argparse.Namespace) -> int:
    if args.prompt is None:
        return chat.run(args)
    args.chat, args.raw = True, False
    return generate.run(args)
