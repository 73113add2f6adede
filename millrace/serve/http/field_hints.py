"""What to send instead of a field that an endpoint does not know."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec

_MAX_LISTED_FIELDS = 8
_SYSTEM = ("instructions", "system", "system_prompt")
_SYNONYMS = (
    ("messages", "input", "prompt", "query"),
    (
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"),
        *("max_new_tokens", "n_predict", "max_gen_len", "max_length"),
    ),
    ("stop", "stop_sequences"),
    _SYSTEM,
    ("repetition_penalty", "repeat_penalty"),
    ("response_format", "format", "output_format", "json_schema", "guided_json"),
    ("grammar", "ebnf", "guided_grammar"),
    ("regex", "guided_regex"),
    ("reasoning_effort", "effort", "think", "thinking", "enable_thinking"),
)
"""Names of one meaning in the dialects and in other engines; those that an endpoint has are preferred from the left."""


def field_hint(field: str, structs: Iterable[type[msgspec.Struct]]) -> str:
    """A sentence: the known field that was probably meant, or all of them if they are few."""
    kinds = tuple(structs)
    known = sorted({name for kind in kinds for name in kind.__struct_encode_fields__})
    inner = _inner_fields(kinds)
    if field in inner:
        return f"It belongs in '{inner[field]}'."
    for names in _SYNONYMS:
        if field not in names:
            continue
        for name in names:
            if name in known:
                return f"Here it is called '{name}'."
            if name in inner:
                return f"Here it is '{inner[name]}.{name}'."
    if field in _SYSTEM and "messages" in known:
        return "Send it as a message whose role is 'system'."
    if close := difflib.get_close_matches(field, known, n=1, cutoff=0.6):
        return f"Did you mean '{close[0]}'?"
    if close := difflib.get_close_matches(field, inner, n=1, cutoff=0.8):
        return f"Did you mean '{inner[close[0]]}.{close[0]}'?"
    if 0 < len(known) <= _MAX_LISTED_FIELDS:
        return f"It has {', '.join(known)}."
    return "Remove it; unknown fields are not ignored."


@cache
def _inner_fields(structs: tuple[type[msgspec.Struct], ...]) -> dict[str, str]:
    """Fields of the objects directly inside, each with the name of its object; of lists nothing."""
    found: dict[str, str] = {}
    for struct in structs:
        hints = typing.get_type_hints(struct)
        for name, shown in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
            for inner in _fields_inside(hints[name]):
                found.setdefault(inner, shown)
    return found


def _fields_inside(hint: Any) -> Iterator[str]:
    for kind in (hint, *typing.get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from kind.__struct_encode_fields__
