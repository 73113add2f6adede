"""Calls written as JSON: `{"name": …, "arguments": {…}}`, alone or in a list, and Mistral's `name[ARGS]{…}`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from millrace.text.tools.call_body import CallBody
from millrace.text.tools.json_scanner import JsonScanner, json_text

ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_CALL_KEYS = frozenset((*ARGUMENT_KEYS, "name", "function", "type", "id", "tool_name", "tool_call_id"))
_SPACE = " \t\n\r"
_NAMED_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_MAX_HEAD_CHARS = 512


class JsonCalls(CallBody):
    """One call object, several, or a list of them."""

    def __init__(self, names: Collection[str] | None, name_key: str = "name") -> None:
        """`names`: only these are calls; None takes any name."""
        super().__init__()
        self._names = names
        self._name_key = name_key
        self._scanner: JsonScanner | None = None
        self._name: str | None = None
        self._is_list = False
        self._num_calls = 0
        self._needs_comma = False
        self._arguments_done = False
        self._object_at = 0
        """Where the object begins in `pending`."""

    def feed(self, char: str) -> bool:
        if self.is_over:
            return False
        if self._scanner is not None:
            return self._feed_object(char)
        return self._feed_between(char)

    # -- between calls -------------------------------------------------------------------------------------------------
    def _feed_between(self, char: str) -> bool:
        if char in _SPACE:
            self._hold(char)
        elif char == "{" and not self._needs_comma:
            self._begin_object()
            return self._feed_object(char)
        elif char == "[" and not self._is_list and self._num_calls == 0:
            self._is_list = True
            self._hold(char)
        elif (char == "," and self._needs_comma) or (char in ",;" and self._num_calls and not self._is_list):
            self._needs_comma = False
            self.pending = char
        elif char == "]" and self._is_list and self._num_calls:
            self.pending = ""
            self.is_over = True
        else:
            return self._refuse()
        return True

    def _hold(self, char: str) -> None:
        """Space between calls means nothing; before the first call it may turn out to be text."""
        if self._num_calls == 0 or self.pending:
            self.pending += char

    # -- inside a call -------------------------------------------------------------------------------------------------
    def _begin_object(self) -> None:
        self._scanner = JsonScanner()
        self._name = None
        self._arguments_done = False
        self._object_at = len(self.pending)

    def _feed_object(self, char: str) -> bool:
        scanner = self._scanner
        assert scanner is not None
        depth, shown = scanner.depth, scanner.escaped(char)
        if not scanner.feed(char):
            return self._refuse()
        if depth == 1 and not self._name_key and not self.is_writing:
            self._name = scanner.key
        elif depth == 1 and scanner.string is not None and scanner.key == self._name_key:
            self._name = scanner.string
        if self._is_other_object(depth):
            self.pending += char
            self.is_over = True
        elif self.is_writing:
            if not self._arguments_done:
                self._add_arguments(shown)
                self._arguments_done = scanner.depth == 1
        elif self._opens_arguments(depth, char) and self._is_known(self._name):
            assert self._name is not None
            self._start_call(self._name)
            self._add_arguments(shown)
        else:
            self.pending += char
        return self._end_object() if scanner.is_done and not self.is_over else True

    def _opens_arguments(self, depth: int, char: str) -> bool:
        scanner = self._scanner
        assert scanner is not None
        is_key = not self._name_key or scanner.key in ARGUMENT_KEYS
        return depth == 1 and scanner.depth == 2 and char == "{" and is_key

    def _is_other_object(self, depth: int) -> bool:
        """True as soon as an object without an opening cannot be a call, so that JSON answers are not held back."""
        if self._names is None or depth != 1 or self.is_writing:
            return False
        scanner = self._scanner
        assert scanner is not None
        has_other_key = scanner.key is not None and scanner.key not in _CALL_KEYS
        return has_other_key or (self._name is not None and self._name not in self._names)

    def _end_object(self) -> bool:
        self._scanner = None
        if self.is_writing:
            self._end_call(is_complete=True)
        else:
            found = call_in(json.loads(self.pending[self._object_at :], strict=False), self._name_key)
            if found is None or not self._is_known(found[0]):
                self.is_over = True
                return True
            self._whole_call(*found)
        self._num_calls += 1
        self._needs_comma = self._is_list
        return True

    def break_off(self) -> None:
        """The brackets around whole arguments may be missing: models forget the last one."""
        if self.is_writing and self._arguments_done:
            self._end_call(is_complete=True)
        super().break_off()

    def cut(self) -> None:
        if self.is_writing:
            self._end_call(is_complete=False)
        elif self._scanner is not None and self._name is not None and self._is_known(self._name):
            self._cut_call(self._name)
        super().cut()

    def _is_known(self, name: str | None) -> bool:
        is_name = name is not None and name != "" and name.isprintable()
        return is_name and (self._names is None or name in self._names)


class NamedCalls(JsonCalls):
    """Mistral: the name, then its arguments, as `[TOOL_CALLS]` begins each call; or a list as in older models."""

    def __init__(self, names: Collection[str] | None) -> None:
        super().__init__(names)
        self._is_named = False
        self._is_decided = False

    def feed(self, char: str) -> bool:
        if not self._is_decided:
            if self.is_over:
                return False
            if char in _SPACE:
                self.pending += char
                return True
            self._is_decided, self._is_named = True, char not in "[{"
        return self._feed_named(char) if self._is_named else super().feed(char)

    def _feed_named(self, char: str) -> bool:
        if self.is_over:
            return False
        scanner = self._scanner
        if scanner is None:
            self.pending += char
            if char != "{":
                return len(self.pending) < _MAX_HEAD_CHARS or self._refuse()
            head = _NAMED_HEAD.match(self.pending)
            if head is None or head.end() != len(self.pending) - 1 or not self._is_known(head[1]):
                self.is_over = True
                return True
            scanner = self._scanner = JsonScanner()
            self._start_call(head[1])
        shown = scanner.escaped(char)
        if not scanner.feed(char):
            return self._refuse()
        self._add_arguments(shown)
        if scanner.is_done:
            self._end_call(is_complete=True)
            self.is_over = True
        return True


def call_in(value: Any, name_key: str = "name") -> tuple[str, str] | None:
    """Name and arguments (JSON) of a call object in any of the usual spellings, or None."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    if not name_key:
        return None  # Arguments that are no object.
    name = value.get(name_key, value.get("name", value.get("function")))
    if not isinstance(name, str) or not name:
        return None
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        shown = json_text({} if arguments in (None, []) else arguments)
    except (ValueError, RecursionError):
        return None
    return (name, shown) if shown.startswith("{") else None
