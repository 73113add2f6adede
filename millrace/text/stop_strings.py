"""Finds stop strings in streamed text, and holds text back while it may be the start of one."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """Stop strings of one stream. The result depends only on the text, not on how it is cut into pieces.

    The earliest match wins; among matches at the same position, the stop string that was given first. A complete match
    therefore waits while one with precedence can still complete. Text is released once no stop string can start in it.
    """

    __slots__ = ("_by_first", "_held", "_include", "_start", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` keeps the stop string itself at the end of the text. Empty strings never match."""
        self._by_first: dict[str, list[str]] = {}
        for stop in dict.fromkeys(stops):
            if stop:
                self._by_first.setdefault(stop[0], []).append(stop)
        self._start = _start_pattern(self._by_first)
        self._include = include
        self._held = ""
        """Text held back; a stop string may start at its first character."""
        self.matched: str | None = None
        """The stop string that ended the text. No text is returned after it."""

    def push(self, text: str) -> str:
        """Text that can be sent now."""
        if self.matched is not None:
            return ""
        if self._held:
            return self._scan(self._held + text, 0, at_end=False)
        found = self._start.search(text)
        return text if found is None else self._scan(text, found.start(), at_end=False)

    def flush(self) -> str:
        """Text still held back, at the end of the stream. Can complete a match."""
        if self.matched is not None or not self._held:
            return ""
        return self._scan(self._held, 0, at_end=True)

    def _scan(self, text: str, start: int, *, at_end: bool) -> str:
        """Check every position from `start` on where a stop string may start."""
        while True:
            rest = text[start:]
            for stop in self._by_first[text[start]]:
                if rest.startswith(stop):
                    self._held, self.matched = "", stop
                    return text[:start] + (stop if self._include else "")
                if not at_end and stop.startswith(rest):
                    self._held = rest
                    return text[:start]
            found = self._start.search(text, start + 1)
            if found is None:
                self._held = ""
                return text
            start = found.start()


def _start_pattern(by_first: dict[str, list[str]]) -> re.Pattern[str]:
    """Matches where a stop string may start: its first two characters, or its first one at the end of the text."""
    starts = []
    for first, stops in by_first.items():
        seconds = "".join(re.escape(stop[1]) for stop in stops if len(stop) > 1)
        is_enough = any(len(stop) == 1 for stop in stops)
        starts.append(re.escape(first) + ("" if is_enough else rf"(?:[{seconds}]|\Z)"))
    return re.compile("|".join(starts) if starts else "(?!)")
