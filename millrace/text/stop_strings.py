"""Finds stop strings in a text that arrives in pieces, and lets nothing out that may turn out to belong to one."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """Watches one text. The outcome depends on the text alone, not on the pieces it came in.

    The match that begins first in the text wins; of those that begin at one place, the stop string given first. So a
    finished match waits while a better one can still be completed, and is taken when that fails or the text ends. Text
    is released as soon as no stop string can begin in it any more.
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
        """Begins where a stop string may have begun."""
        self.matched: str | None = None
        """The stop string that ended the text. From then on nothing more is let out."""

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        if self.matched is not None:
            return ""
        if self._held:
            return self._scan(self._held + text, 0, at_end=False)
        found = self._start.search(text)
        return text if found is None else self._scan(text, found.start(), at_end=False)

    def flush(self) -> str:
        """The text still held back, when nothing more will come. May complete a match."""
        if self.matched is not None or not self._held:
            return ""
        return self._scan(self._held, 0, at_end=True)

    def _scan(self, text: str, start: int, *, at_end: bool) -> str:
        """Decide about every place from `start` on where a stop string may begin."""
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
    """Where a stop string may begin: its first two characters, or its first at the end of the text."""
    starts = []
    for first, stops in by_first.items():
        seconds = "".join(re.escape(stop[1]) for stop in stops if len(stop) > 1)
        is_enough = any(len(stop) == 1 for stop in stops)
        starts.append(re.escape(first) + ("" if is_enough else rf"(?:[{seconds}]|\Z)"))
    return re.compile("|".join(starts) if starts else "(?!)")
