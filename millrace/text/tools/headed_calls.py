"""Calls with a head and JSON arguments: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME … {…}<｜tool▁call▁end｜>`."""

from __future__ import annotations

import re
from collections.abc import Collection

from millrace.text.tools.call_body import CallBody
from millrace.text.tools.json_scanner import JsonScanner
from millrace.text.tools.shapes import HeadedShape

_SPACE = " \t\n\r"
_MAX_HEAD_CHARS = 512
_FENCE = "`"


class HeadedCalls(CallBody):
    def __init__(self, shape: HeadedShape, names: Collection[str] | None) -> None:
        """`names`: only these are calls; None takes any name."""
        super().__init__()
        self._shape = shape
        self._head = re.compile(shape.head)
        self._names = names
        self._scanner: JsonScanner | None = None
        self._tail: str | None = None
        """Text after the arguments, while the call's end is awaited."""

    def feed(self, char: str) -> bool:
        if self.is_over:
            return False
        if self._tail is not None:
            return self._feed_tail(char)
        return self._feed_head(char) if self._scanner is None else self._feed_arguments(char)

    def _feed_head(self, char: str) -> bool:
        begin, text = self._shape.begin, (self.pending + char).lstrip(_SPACE)
        if not (begin.startswith(text) or text.startswith(begin)) or len(text) > _MAX_HEAD_CHARS:
            return self._refuse()
        if char != "{":
            self.pending += char
            return True
        found = self._head.fullmatch(text[:-1])
        if found is None or (self._names is not None and found["name"] not in self._names):
            return self._refuse()
        self._start_call(found["name"], found.groupdict().get("id") or "")
        self._scanner = JsonScanner()
        return self._feed_arguments(char)

    def _feed_arguments(self, char: str) -> bool:
        scanner = self._scanner
        assert scanner is not None
        shown = scanner.escaped(char)
        if not scanner.feed(char):
            return self._refuse()
        self._add_arguments(shown)
        if scanner.is_done:
            self._end_call(is_complete=True)
            self._scanner, self._tail = None, ""
        return True

    def _feed_tail(self, char: str) -> bool:
        assert self._tail is not None
        tail = self._tail + char
        marker = tail.lstrip(_SPACE + _FENCE)
        if not self._shape.end.startswith(marker):
            self.pending, self._tail = self._tail, None
            return self._refuse()
        self._tail = None if marker == self._shape.end else tail
        return True

    def break_off(self) -> None:
        super().break_off()
        if self._tail is not None and not self._shape.end.startswith(self._tail.lstrip(_SPACE + _FENCE)):
            self.pending = self._tail
        self._tail = None
