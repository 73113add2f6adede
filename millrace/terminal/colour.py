"""Whether to write colours to a stream, and the few escapes we use."""

from __future__ import annotations

from typing import TextIO

from millrace.config import allows_colour

RED, DIM, BOLD_CYAN, PLAIN = "\033[31m", "\033[2m", "\033[1;36m", "\033[0m"


def wants_colour(stream: TextIO) -> bool:
    """True on a terminal, unless the user has switched colours off."""
    return stream.isatty() and allows_colour()


def coloured(text: str, colour: str, stream: TextIO) -> str:
    return f"{colour}{text}{PLAIN}" if wants_colour(stream) else text
