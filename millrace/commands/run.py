"""`millrace run MODEL`: downloads the model if needed and chats with it, or answers one prompt."""

from __future__ import annotations

import argparse
import os
import stat
import sys

from millrace.commands import chat, generate
from millrace.terminal.settings_options import given_settings

USAGE = "millrace run MODEL [PROMPT] [options]"
EXAMPLES = """\
A server of yours that runs this model answers, unless options say how to load
it. Text from a pipe comes before PROMPT, or is the prompt.

examples:
  millrace run llama3.2-1b                           chat
  millrace run llama3.2-1b "Why is the sky blue?"    one answer, then exit
  cat notes.txt | millrace run smollm2 "Summarise this."
  echo "A long text" | millrace run smollm2 --system "Summarise this." -"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chat.add_arguments(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and exit; - reads standard input")
    parser.add_argument("--json", action="store_true", help="with PROMPT: print one JSON object instead of the text")


def run(args: argparse.Namespace) -> int:
    # Options that say how to load the model are for an engine of this command.
    args.finds_server = not args.config and not given_settings(args).keys() - {"model.source"}
    if args.prompt != "-" and _is_piped():
        args.prompt = "\n\n".join(part for part in (sys.stdin.read().strip(), args.prompt) if part) or None
    if args.prompt is None:
        return chat.run(args)
    args.chat, args.raw = True, False
    return generate.run(args)


def _is_piped() -> bool:
    """True if standard input is a pipe or a file. A terminal, /dev/null and a closed one are not read."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
