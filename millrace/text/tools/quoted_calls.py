"""Calls of Gemma's newer models: `call:NAME{key:<escape>text<escape>,other:[1,true]}`, strings between markers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from millrace.text.tools.call_body import CallBody
from millrace.text.tools.json_scanner import json_text
from millrace.text.tools.shapes import QuotedShape

_SPACE = " \t\n\r"
_HEAD = re.compile(r"call:\s*(?P<name>[\w.-]+)\s*", re.ASCII)
_BARE = re.compile(r"[^,:{}\[\]]+")
_MAX_CALL_CHARS = 1_000_000
_MAX_DEPTH = 64


class QuotedCalls(CallBody):
    """A call is reported when its closing bracket is read, since its arguments become JSON only then."""

    def __init__(self, shape: QuotedShape, names: Collection[str] | None) -> None:
        """`names`: only these are calls; None takes any name."""
        super().__init__()
        self._quote = shape.quote
        self._names = names
        self._text = ""
        self._name = ""
        self._depth = 0
        self._in_string = ""
        """The marker that ends the string, inside of one."""
        self._string_at = 0
        self._is_escaped = False

    def feed(self, char: str) -> bool:
        if self.is_over:
            return False
        self.pending += char
        self._text += char
        if self._in_string:
            self._feed_string(char)
        elif self._name and self._text.endswith(self._quote):
            self._in_string, self._string_at = self._quote, len(self._text)
        elif self._name and char == '"' and not self._is_in_marker():
            self._in_string = '"'
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close()
        elif not self._name and not _may_be_head(self._text):
            self.is_over = True
        if len(self._text) > _MAX_CALL_CHARS:
            self.is_over = True
        return True

    def _feed_string(self, char: str) -> None:
        if self._in_string == self._quote:
            is_end = self._text.endswith(self._quote) and len(self._text) >= self._string_at + len(self._quote)
        else:  # JSON
            is_end = char == '"' and not self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
        if is_end:
            self._in_string = ""

    def cut(self) -> None:
        if self._name:
            self._cut_call(self._name)
        super().cut()

    def _is_in_marker(self) -> bool:
        """True if the marker itself has this quotation mark."""
        return any(self._text.endswith(self._quote[: size + 1]) for size, c in enumerate(self._quote) if c == '"')

    def _open(self, char: str) -> None:
        if not self._name:
            head = _HEAD.fullmatch(self._text[:-1].lstrip(_SPACE))
            if char != "{" or head is None or (self._names is not None and head["name"] not in self._names):
                self.is_over = True
                return
            self._name, self._text = head["name"], char
        self._depth += 1

    def _close(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        try:
            arguments = _Reader(self._text, self._quote).value(0)
            if self._name and isinstance(arguments, dict):
                self._whole_call(self._name, json_text(arguments))
        except ValueError:
            pass
        self.is_over = True


class _Reader:
    """Reads one value. Raises ValueError for text that is none."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            items: list[Any] = []
            while not self._take("]"):
                items.append(self.value(depth + 1))
                self._end_item("]")
            return items
        if (text := self._string()) is not None:
            return text
        word = self._bare()
        try:
            return json.loads(word)
        except ValueError:
            return word

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self._string()
            key = self._bare() if key is None else key
            if not self._take(":"):
                raise ValueError("a key without a value")
            found[key] = self.value(depth + 1)
            self._end_item("}")
        return found

    def _end_item(self, bracket: str) -> None:
        if not self._take(",") and self._text[self._at : self._at + 1] != bracket:
            raise ValueError("neither a comma nor the end")

    def _take(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1] in _SPACE and self._at < len(self._text):
            self._at += 1
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _string(self) -> str | None:
        if self._take(self._quote):
            end = self._text.find(self._quote, self._at)
            if end < 0:
                raise ValueError("a string without an end")
            text, self._at = self._text[self._at : end], end + len(self._quote)
            return text
        if self._take('"'):
            value, self._at = json.JSONDecoder(strict=False).raw_decode(self._text, self._at - 1)
            return str(value)
        return None

    def _bare(self) -> str:
        found = _BARE.match(self._text, self._at)
        if found is None:
            raise ValueError("no value")
        self._at = found.end()
        return found[0].strip(_SPACE)


def _may_be_head(text: str) -> bool:
    text = text.lstrip(_SPACE)
    return "call:".startswith(text) or bool(re.fullmatch(r"call:\s*[\w.-]*\s*", text, re.ASCII))
