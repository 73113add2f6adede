"""Calls written as Python: `[get_weather(city="Paris"), get_time()]`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.text.tools.call_body import CallBody
from millrace.text.tools.json_scanner import json_text

_SPACE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_CLOSING = {")": "(", "]": "[", "}": "{"}
_MAX_CALL_CHARS = 1_000_000
_PRINT = "print"


class PythonCalls(CallBody):
    """A list of calls, or calls one after the other. A call is reported when its closing bracket is read, since its
    arguments become JSON only then."""

    def __init__(self, parameters: Mapping[str, Sequence[str]], *, needs_list: bool, any_name: bool = False) -> None:
        """`parameters`: for each function, the names of its parameters in order."""
        super().__init__()
        self._parameters = parameters
        self._needs_list = needs_list
        self._any_name = any_name
        self._is_list = False
        self._num_calls = 0
        self._needs_comma = False
        self._text = ""
        """The call that is being read."""
        self._brackets: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def feed(self, char: str) -> bool:
        if self.is_over:
            return False
        return self._feed_call(char) if self._text else self._feed_between(char)

    def _feed_between(self, char: str) -> bool:
        if char in _SPACE:
            if self._num_calls == 0:
                self.pending += char
            elif char == "\n" and not self._is_list:
                self._needs_comma = False
        elif char == "[" and not self._is_list and self._num_calls == 0:
            self._is_list = True
            self.pending += char
        elif char in ",;" and self._needs_comma:
            self._needs_comma = False
            self.pending = char
        elif char == "]" and self._is_list and self._num_calls:
            self.pending = ""
            self.is_over = True
        elif _NAME.fullmatch(char) and not self._needs_comma and (self._is_list or not self._needs_list):
            self._text = char
            self.pending += char
        else:
            return self._refuse()
        return True

    def _feed_call(self, char: str) -> bool:
        self.pending += char
        self._text += (r"\n" if self._quote else " ") if char == "\n" else char
        if len(self._text) > _MAX_CALL_CHARS:
            self.is_over = True
            return True
        if self._quote:
            self._feed_quoted(char)
        elif not self._brackets:
            if char == "(" and self._is_known(self._text[:-1].strip()):
                self._brackets.append(char)
            elif not self._may_be_name():
                self.is_over = True
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._brackets.append(char)
        elif char in _CLOSING:
            if self._brackets.pop() != _CLOSING[char]:
                self.is_over = True
            elif not self._brackets:
                self._end_python_call()
        return True

    def _feed_quoted(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""

    def _may_be_name(self) -> bool:
        name = self._text.strip()
        if not _NAME.fullmatch(name):
            return False
        return self._any_name or any(known.startswith(name) for known in (*self._parameters, _PRINT))

    def _is_known(self, name: str) -> bool:
        return bool(_NAME.fullmatch(name)) and (self._any_name or name in self._parameters or name == _PRINT)

    def _end_python_call(self) -> None:
        found = self._read(self._text)
        self._text = ""
        if found is None:
            self.is_over = True
            return
        self._whole_call(*found)
        self._num_calls += 1
        self._needs_comma = True

    def cut(self) -> None:
        name = self._text.partition("(")[0].strip()
        if self._brackets and name != _PRINT:
            self._cut_call(name)
        super().cut()

    def _read(self, text: str) -> tuple[str, str] | None:
        try:
            node = ast.parse(text, mode="eval").body
            if isinstance(node, ast.Call) and _name_of(node.func) == _PRINT and len(node.args) == 1:
                node = node.args[0]
            if not isinstance(node, ast.Call):
                return None
            name = _name_of(node.func)
            if not self._is_known(name) or name == _PRINT:
                return None
            names = self._parameters.get(name, ())
            if len(node.args) > len(names):
                return None
            arguments = {key: _value(arg) for key, arg in zip(names, node.args, strict=False)}
            for keyword in node.keywords:
                if keyword.arg is None or keyword.arg in arguments:
                    return None
                arguments[keyword.arg] = _value(keyword.value)
            return name, json_text(arguments)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr) -> Any:
    """The JSON value that a literal spells. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(item) for key, item in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _value(node.operand)
        if type(number) in (int, float):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a string key")
