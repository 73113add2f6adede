"""Checks JSON one character at a time, so that it can be passed on while it is being written."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SPACE = " \t\n\r"
_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HALF_OR_PAIR = re.compile(rf"{_HIGH_HALF.pattern}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|\\u[dD][89a-fA-F][0-9a-fA-F]{{2}}")
_NUM_ESCAPE_CHARS = 6
_LITERALS = {"t": "true", "f": "false", "n": "null"}
MAX_DEPTH = 200


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()


class JsonScanner:
    """One JSON value. Raw control characters in strings are accepted, since models write line breaks so; the reader
    must escape them (`escaped`)."""

    __slots__ = ("_escape", "_expect", "_held", "_is_key", "_number", "_string", "_word", "key", "stack", "string")

    def __init__(self) -> None:
        self.stack: list[str] = []
        """Open brackets, outermost first."""
        self.key: str | None = None
        """The key that was read last."""
        self.string: str | None = None
        """The string value that ended with the last character, if one did."""
        self._expect = _Expect.VALUE
        self._string: list[str] | None = None
        self._is_key = False
        self._escape = 0
        """Characters of an escape sequence that are still to come; 5 after its backslash."""
        self._held = ""
        """An escape sequence that `escaped` has not passed on yet."""
        self._number = ""
        self._word = ""
        """The rest of a literal."""

    @property
    def depth(self) -> int:
        return len(self.stack)

    @property
    def is_done(self) -> bool:
        return self._expect is _Expect.NOTHING and not self._number and not self._word and self._string is None

    @property
    def in_string(self) -> bool:
        return self._string is not None

    def feed(self, char: str) -> bool:
        """False if this character cannot come here; the scanner is then of no further use."""
        self.string = None
        if self._string is not None:
            return self._feed_string(char)
        if self._word:
            ok, self._word = char == self._word[0], self._word[1:]
            return ok
        if self._number:
            if char in "+-.eE0123456789":
                self._number += char
                return len(self._number) < 400
            if not _NUMBER.fullmatch(self._number):
                return False
            self._number = ""
        return char in _SPACE or self._feed_token(char)

    def escaped(self, char: str) -> str:
        """What valid JSON has for this character, which is fed next. Escape sequences come out whole; one of half a
        surrogate pair, which many clients cannot read, comes out as U+FFFD."""
        if self._string is None:
            return char
        if self._escape or char == "\\":
            self._held += char
            is_whole = self._escape == 1 or (self._escape == 5 and char != "u")
            return self._passed_on() if is_whole else ""
        shown = json.dumps(char)[1:-1] if char < " " else char
        return self._passed_on(is_last=True) + shown if self._held else shown

    def _passed_on(self, *, is_last: bool = False) -> str:
        """Escape sequences of which no more follows. `is_last`: another character follows them."""
        ready = self._held
        if not is_last and _HIGH_HALF.fullmatch(ready[-_NUM_ESCAPE_CHARS:]):
            ready = ready[:-_NUM_ESCAPE_CHARS]
        self._held = self._held[len(ready) :]
        return _HALF_OR_PAIR.sub(lambda found: found[0] if len(found[0]) > _NUM_ESCAPE_CHARS else r"\ufffd", ready)

    def _feed_token(self, char: str) -> bool:
        expect = self._expect
        if expect in (_Expect.VALUE, _Expect.VALUE_OR_END):
            if char == "]" and expect is _Expect.VALUE_OR_END:
                return self._close("[")
            return self._open_value(char)
        if expect in (_Expect.KEY, _Expect.KEY_OR_END):
            if char == "}" and expect is _Expect.KEY_OR_END:
                return self._close("{")
            if char != '"':
                return False
            self._string, self._is_key = [], True
            return True
        if expect is _Expect.COLON:
            self._expect = _Expect.VALUE
            return char == ":"
        if expect is not _Expect.COMMA_OR_END:
            return False
        if char == ",":
            self._expect = _Expect.KEY if self.stack[-1] == "{" else _Expect.VALUE
            return True
        return char in "]}" and self._close("[" if char == "]" else "{")

    def _open_value(self, char: str) -> bool:
        if char in "{[":
            self.stack.append(char)
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.VALUE_OR_END
            return len(self.stack) <= MAX_DEPTH
        self._after_value()
        if char == '"':
            self._string, self._is_key = [], False
        elif char in _LITERALS:
            self._word = _LITERALS[char][1:]
        elif char in "-0123456789":
            self._number = char
        else:
            return False
        return True

    def _close(self, bracket: str) -> bool:
        if not self.stack or self.stack.pop() != bracket:
            return False
        self._after_value()
        return True

    def _after_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END if self.stack else _Expect.NOTHING

    def _feed_string(self, char: str) -> bool:
        assert self._string is not None
        if self._escape == 5:
            self._escape = 4 if char == "u" else 0
            self._string.append(char)
            return char in '"\\/bfnrtu'
        if self._escape:
            self._escape -= 1
            self._string.append(char)
            return char in "0123456789abcdefABCDEF"
        if char == '"':
            return self._end_string()
        if char == "\\":
            self._escape = 5
        self._string.append(char)
        return True

    def _end_string(self) -> bool:
        text, self._string = json.loads(f'"{"".join(self._string or ())}"', strict=False), None
        if self._is_key:
            self.key, self._expect = text, _Expect.COLON
        else:
            self.string = text
        return True


def json_text(value: Any) -> str:
    """The value as JSON; half of a surrogate pair becomes U+FFFD. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def close_partial(text: str) -> str:
    """The longest part of a cut JSON object that is complete in itself, with its brackets closed; "{}" if none is."""
    scanner = JsonScanner()
    best = "{}"
    for place, char in enumerate(text):
        if not scanner.feed(char):
            break
        if scanner.in_string or not scanner.stack or char in _SPACE:
            if not scanner.stack:
                return text[: place + 1]
            continue
        if char in "{[]}":
            best = text[: place + 1] + _closing(scanner.stack)
        elif char == ",":
            best = text[:place] + _closing(scanner.stack)
    return best


def _closing(stack: list[str]) -> str:
    return "".join("}" if bracket == "{" else "]" for bracket in reversed(stack))
