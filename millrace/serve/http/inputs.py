"""The four forms of a prompt: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from millrace.errors import BadRequest
from millrace.serve.http.body import json_error

_T = TypeVar("_T")
_OPENING = re.compile(rb"\s*(\[?)\s*([^\s])")
"""The first two characters tell which of the four forms it has."""


def input_schema(*, min_chars: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": min_chars}
    token_ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    texts, lists = ({"type": "array", "items": one, "minItems": 1} for one in (text, token_ids))
    return {"oneOf": [text, texts, token_ids, lists]}


def texts_or_tokens(raw: msgspec.Raw, field: str, max_lists: int) -> tuple[list[str], list[list[int]]]:
    """One of the two is empty. `field` is named in errors."""
    data = bytes(raw)
    opening = _OPENING.match(data)
    head = opening[1] + opening[2] if opening else b""
    if head.startswith(b'"'):
        return [_decoded(data, str, field, "a text")], []
    if head == b"[[":
        _check_num_lists(data, field, max_lists)
        lists = _decoded(data, list[list[int]], field, "arrays of token ids only")
        return [], [_token_ids(items, field) for items in lists]
    if head == b'["':
        return _decoded(data, list[str], field, "texts only"), []
    if head.startswith(b"[") and head != b"[]":
        return [], [_token_ids(_decoded(data, list[int], field, "token ids only"), field)]
    raise _wrong(field, "is an empty array" if head == b"[]" else "is neither a text nor an array")


def _check_num_lists(data: bytes, field: str, max_lists: int) -> None:
    """Refuse too many lists before they are built."""
    num_lists = data.count(b"[") - 1
    if num_lists > max_lists:
        raise BadRequest(
            f"'{field}' holds {num_lists} lists; at most {max_lists} are allowed in one request. Split it.", param=field
        )


def _decoded(data: bytes, kind: type[_T], field: str, what: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise _wrong(field, f"begins like {what}, but holds something else") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise json_error(error, data) from None


def _token_ids(items: list[int], field: str) -> list[int]:
    """Ids that fit into the message to the engine; `EngineClient` checks them against the vocabulary."""
    if not items:
        raise _wrong(field, "holds an empty array")
    for value in (min(items), max(items)):
        if not 0 <= value < 2**31:
            raise BadRequest(
                f"'{field}' holds the token id {value!s:.40}; ids are between 0 and 2**31 - 1.", param=field
            )
    return items


def _wrong(field: str, what: str) -> BadRequest:
    return BadRequest(
        f"'{field}' {what}; send a text, an array of texts, an array of token ids, or an array of arrays of token ids.",
        param=field,
    )
