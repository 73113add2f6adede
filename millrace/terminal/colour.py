"""Whether to write colours to a stream, and the few escapes we use."""

from __future__ import annotations

import os
from typing import TextIO

RED, DIM, BOLD_CYAN, PLAIN = "\033[31m", "\033[2m", "\033[1;36m", "\033[0m"


def wants_colour(stream: TextIO) -> bool:
    """True on a terminal, unless `NO_COLOR` is set (https://no-color.org) or the terminal is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str, stream: TextIO) -> str:
    return f"{colour}{text}{PLAIN}" if wants_colour(stream) else text
