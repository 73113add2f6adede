r"""Regular expressions for llguidance: `\d` and `\w` stand for ASCII, as in the patterns of JSON Schema; literal text;
and text up to a marker."""

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


def literal(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def free_text(marker: str, ending: str = "") -> str:
    """What a terminal matches: any text without the marker's characters, with this ending. Where the marker is a token,
    its characters must not stand in for it: whoever reads the answer would take them for the marker."""
    return f"/(?s:.*){literal(ending)}/ & ~/(?s:.*){literal(marker)}(?s:.*)/"
