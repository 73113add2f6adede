r"""Regular expressions for llguidance: `\d` and `\w` stand for ASCII, as in the patterns of JSON Schema."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\\.|\[\^?|\]|--|~~|[^\\\[\]~-]+|.", re.DOTALL)
_ASCII = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[ \t\n\r]"}
_IN_CLASS = {r"\d": "[:digit:]", r"\w": "[:word:]", r"\s": r"\x20\t\n\r"}


def ascii_classes(pattern: str, classes: str = "dw") -> str:
    r"""The pattern in which `\d` and `\w` match ASCII only, and `\s`, if asked for, the whitespace of JSON. It matches
    no more than before: negated classes, `\D` and `\W` exclude what they excluded. A model that is free to would write
    digits of other scripts."""
    if not any(f"\\{one}" in pattern for one in classes):
        return pattern
    out: list[str] = []
    negated: list[bool] = []
    """Of each class that is open: whether a character in it is excluded."""
    for part in _PARTS.findall(pattern):
        if part.startswith("["):
            negated.append(part == "[^" or (bool(negated) and negated[-1]))
        elif part == "]" and negated:
            negated.pop()
        elif part in ("--", "~~") and negated:
            return pattern  # Characters are taken away from a class: fewer of them would leave more.
        if part in _ASCII and part[1] in classes and not (negated and negated[-1]):
            part = _IN_CLASS[part] if negated else _ASCII[part]
        out.append(part)
    return "".join(out)
