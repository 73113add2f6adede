"""Building blocks of request schemas: strict structs, and fields that are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Meta, Raw, UnsetType


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request struct: an unknown field is an error."""


Refused = Raw | UnsetType
"""A field that is known but not supported: kept as bytes, never decoded into objects."""


def described(text: str, **schema: Any) -> Meta:
    """Documentation for OpenAPI. `schema` documents limits that are checked elsewhere, mostly in `SamplingParams`."""
    return Meta(description=text, extra_json_schema=schema or None)


def unsupported(text: str) -> Meta:
    return Meta(description=f"Not supported yet; {text}")
