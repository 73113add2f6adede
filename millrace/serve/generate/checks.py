"""Checks of request fields that all dialects share. A failure is a `BadRequest` that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from millrace.errors import BadRequest, ContextOverflow
from millrace.params.sampling import MAX_LOGPROBS

MAX_SEQUENCES = 1024
"""Maximum sequences per HTTP request: prompts × choices."""
MAX_METADATA = 64
_MAX_NEUTRAL_BYTES = 256
_MAX_SHOWN_BYTES = 60


def check_integers(body: msgspec.Struct, prefix: str = "") -> None:
    """Refuse integers beyond 64 bits, before anything computes with them or prints them."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if type(value) is int and value.bit_length() > 64:
            raise BadRequest(
                f"{prefix}{name} is an integer of {value.bit_length()} bits; send one that fits in 64 bits.",
                param=prefix + name,
            )


def refuse_unsupported(body: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], prefix: str) -> None:
    """Refuse unsupported fields. `neutral` maps each to the values that, like null, have no effect and are accepted."""
    for name, accepted in neutral.items():
        raw = getattr(body, name, UNSET)
        if raw is UNSET or _is_neutral(raw, accepted):
            continue
        param = prefix + name
        raise BadRequest(
            f"'{param}' (sent as {_shown(raw)}) is not supported yet; remove it.",
            param=param,
            code="unsupported_parameter",
        )


def _shown(raw: msgspec.Raw) -> str:
    data = bytes(memoryview(raw)[: _MAX_SHOWN_BYTES + 1])
    text = data.decode("utf-8", "ignore")
    return text if len(data) <= _MAX_SHOWN_BYTES else text[:_MAX_SHOWN_BYTES] + "…"


def _is_neutral(raw: msgspec.Raw, accepted: tuple[Any, ...]) -> bool:
    data = memoryview(raw)
    if len(data) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return value is None or any(type(value) is type(one) and value == one for one in accepted)


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def check_logprobs(name: str, value: int | None) -> None:
    check_range(name, value, 0, MAX_LOGPROBS)


def check_num_sequences(num_prompts: int, per_prompt: int) -> None:
    total = num_prompts * per_prompt
    if total > MAX_SEQUENCES:
        raise BadRequest(
            f"The request asks for {num_prompts} prompts × {per_prompt} choices = {total} sequences;"
            f" at most {MAX_SEQUENCES} are allowed in one request. Split it.",
            param="n",
        )


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is not None and len(metadata) > MAX_METADATA:
        raise BadRequest(
            f"metadata holds {len(metadata)} entries; at most {MAX_METADATA} are allowed.", param="metadata"
        )


def name_fields(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """The same error with the field renamed from our name to the dialect's."""
    ours = error.param
    if ours is None or ours not in names:
        return error
    theirs = names[ours]
    kind = ContextOverflow if isinstance(error, ContextOverflow) else BadRequest
    message = error.message if ours == "prompt" else re.sub(rf"\b{re.escape(ours)}\b", theirs, error.message)
    return kind(message, param=theirs, code=error.code)
