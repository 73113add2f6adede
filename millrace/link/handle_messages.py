"""Answers about prefixes that handles keep cached."""

from __future__ import annotations

import msgspec


class HandleFigures(msgspec.Struct, frozen=True):
    """A prefix that is kept cached."""

    name: str
    owner: str
    tokens: int
    resident_tokens: int
    """Those of them, from the first on, that need not be computed now."""
    bytes: int
    age_s: float
    ttl_s: float
    expires_in_s: float
    is_hint: bool
    locations: dict[str, int]
    """Tokens by the nearest location that has their block."""


class HandleList(msgspec.Struct, frozen=True):
    """The answer to a `Query` for handles."""

    handles: list[HandleFigures]
    used_bytes: int
    max_bytes: int
    """That all tenants' handles may keep together."""
