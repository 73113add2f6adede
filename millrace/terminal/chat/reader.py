"""Reads the user's turns: line editing, history, several pasted lines as one turn, text between triple quotes."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Iterator
from pathlib import Path

from millrace.config import data_dir
from millrace.terminal.colour import BOLD_CYAN, PLAIN, wants_colour

QUOTES = '"""'
_PASTE_GAP_S = 0.03
"""Lines that are there this soon after the one before were pasted, not typed."""
_HISTORY_LINES = 1000


class TurnReader:
    def __init__(self, *, on_terminal: bool) -> None:
        self._on_terminal = on_terminal
        self._history: Path | None = None
        if on_terminal:
            self._open_history()

    def read(self) -> str:
        """One turn, without surrounding space. Raises `EOFError` at the end of the input."""
        lines = [input(self._prompt())]
        if lines[0].lstrip().startswith(QUOTES):
            return self._quoted(lines[0].lstrip().removeprefix(QUOTES))
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(self._more()))
        while self._on_terminal and _has_input():
            lines.append(input(""))
        return "\n".join(lines).strip()

    def _quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            line = input(self._more())
        lines.append(line.rstrip().removesuffix(QUOTES))
        return "\n".join(lines).strip("\n")

    def _more(self) -> str:
        return "  … " if self._on_terminal else ""

    def _prompt(self) -> str:
        if not self._on_terminal:
            return ""
        if not wants_colour(sys.stdout):
            return "you › "
        # \001 and \002 tell readline that the escapes between them take no columns.
        return f"\001{BOLD_CYAN}\002you ›\001{PLAIN}\002 "

    def _open_history(self) -> None:
        import readline  # Gives input() line editing and history.

        # A pasted text then arrives as one line with line feeds, even with a slow terminal.
        readline.parse_and_bind("set enable-bracketed-paste on")
        path = data_dir() / "chat_history"
        with contextlib.suppress(OSError):  # No history is no reason not to chat.
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch(mode=0o600)
            readline.read_history_file(path)
            self._history = path

    def close(self) -> None:
        if self._history is not None:
            import readline

            readline.set_history_length(_HISTORY_LINES)
            with contextlib.suppress(OSError):
                readline.write_history_file(self._history)


def _has_input() -> bool:
    return bool(select.select([sys.stdin], [], [], _PASTE_GAP_S)[0])


@contextlib.contextmanager
def without_echo(*, on_terminal: bool) -> Iterator[None]:
    """What is typed meanwhile is not shown; it appears at the next prompt. Ctrl-C works as before."""
    if not on_terminal:
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
