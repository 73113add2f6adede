"""Calls with a tag for each argument: `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from millrace.text.tools.argument_kinds import ALL_KINDS, STRING, kinds_of, parameter_schemas, value_of
from millrace.text.tools.call_body import CallBody
from millrace.text.tools.formats import Function
from millrace.text.tools.shapes import TaggedShape

_SPACE = " \t\n\r"
_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[\w.-]+", re.ASCII)


class TaggedCalls(CallBody):
    """Strings are passed on while they are written; other values when they are complete, since they may turn out to
    be strings."""

    def __init__(self, shape: TaggedShape, functions: Sequence[Function], *, is_named: bool) -> None:
        """`is_named`: the tag before the name has been read, and only functions that exist are calls."""
        super().__init__()
        self._shape = shape
        self._functions = {function.name: function for function in functions}
        self._needs_known = is_named
        self._kinds: dict[str, frozenset[str]] = {}
        self._key_end = re.compile(rf"{shape.key_attribute}\s*".join(_spaced(shape.key_end)))
        self._text = ""
        """Of the part that is being read."""
        self._num_arguments = 0
        self._value_kinds = ALL_KINDS
        self._is_streaming = False
        """True while a string's text is passed on."""
        self._is_first_char = False
        self._read: Callable[[str], bool] = self._read_open if shape.call_open and not is_named else self._read_name

    def feed(self, char: str) -> bool:
        return not self.is_over and self._read(char)

    def break_off(self) -> None:
        if self._is_streaming:
            self._add_arguments(_escaped(self._text))
        super().break_off()

    # -- the name ------------------------------------------------------------------------------------------------------
    def _read_open(self, char: str) -> bool:
        text = self.pending.lstrip(_SPACE) + char
        if char not in _SPACE or text.strip(_SPACE):
            if not self._shape.call_open.startswith(text):
                return self._refuse()
            if text == self._shape.call_open:
                self._read = self._read_name
        self.pending += char
        return True

    def _read_name(self, char: str) -> bool:
        """The name ends with its tag, or where the tag of an argument or the end of the call begins."""
        self.pending += char
        self._text += char
        name = self._text.strip(_SPACE)
        ends_line = char == "\n" and self._shape.name_end == "\n" and bool(name)
        if self._text.endswith(self._shape.name_end) and (ends_line or self._shape.name_end != "\n"):
            return self._begin_call(self._text.removesuffix(self._shape.name_end).strip(_SPACE), "")
        if self._shape.name_end == "\n" and char == "<" and len(name) > 1:
            return self._begin_call(name[:-1].strip(_SPACE), "<")
        if (name and not _NAME.match(name)) or len(name) > _MAX_NAME_CHARS:
            self.is_over = True
        return True

    def _begin_call(self, name: str, rest: str) -> bool:
        function = self._functions.get(name)
        if not _NAME.fullmatch(name) or (function is None and self._needs_known):
            self.is_over = True
            return True
        schema = function.parameters if function is not None else {}
        self._kinds = {key: kinds_of(value, schema) for key, value in parameter_schemas(schema).items()}
        self._start_call(name)
        self._add_arguments("{")
        self._num_arguments = 0
        self._text, self._read = rest, self._read_inside
        return True

    # -- arguments -----------------------------------------------------------------------------------------------------
    def _read_inside(self, char: str) -> bool:
        """Between arguments: the next one, or the end of the call."""
        text = (self._text + char).lstrip(_SPACE)
        if text == self._shape.key_open:
            self._text, self._read = "", self._read_key
        elif text == self._shape.call_end:
            self._add_arguments("}")
            self._end_call(is_complete=True)
            self._text, self._read = "", self._read_open
            self.is_over = not self._shape.call_open
        elif self._shape.key_open.startswith(text) or self._shape.call_end.startswith(text):
            self._text = text
        else:
            self.pending = self._text
            return self._refuse()
        return True

    def _read_key(self, char: str) -> bool:
        self._text += char
        found = self._key_end.search(self._text)
        if found is None:
            return len(self._text) <= 4 * _MAX_NAME_CHARS or self._refuse()
        key = self._text[: found.start()].strip(_SPACE)
        comma = ", " if self._num_arguments else ""
        self._add_arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._value_kinds = self._kinds.get(key, ALL_KINDS)
        self._is_streaming = self._value_kinds == {STRING}
        if self._is_streaming:
            self._add_arguments('"')
        self._text, self._read, self._is_first_char = "", self._read_value, True
        return True

    def _read_value(self, char: str) -> bool:
        newline = self._shape.newline
        if self._is_first_char and newline:
            self._is_first_char = False
            if char == newline:
                return True
        self._text += char
        if char == self._shape.value_end[-1] and self._text.endswith(self._shape.value_end):
            text = self._text.removesuffix(self._shape.value_end).removesuffix(newline)
            shown = f'{_escaped(text)}"' if self._is_streaming else value_of(text, self._value_kinds)
            self._add_arguments(shown)
            self._text, self._read, self._is_streaming = "", self._read_inside, False
        elif self._is_streaming:
            keep = _num_kept(self._text, newline + self._shape.value_end, self._shape.value_end)
            said = self._text[: len(self._text) - keep]
            if said:
                self._add_arguments(_escaped(said))
                self._text = self._text[len(said) :]
        return True


def _spaced(key_end: str) -> tuple[str, str]:
    """The text as two regular expressions, to be joined by what may stand between them."""
    if "\n" in key_end:
        before, after = key_end.split("\n")
        return re.escape(before), re.escape(after)
    # An attribute stands before the bracket that ends the tag.
    return re.escape(key_end[:-1]), re.escape(key_end[-1])


def _num_kept(text: str, *ends: str) -> int:
    """Length of the longest end of the text with which one of `ends` may begin."""
    longest = max(map(len, ends))
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(end.startswith(text[-size:]) for end in ends):
            return size
    return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
