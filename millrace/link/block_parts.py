"""Messages by which a front exports and imports kept prefixes: parts of their KV blocks, as bytes."""

from __future__ import annotations

import msgspec

from millrace.params.keeping import Retain


class PrefixFacts(msgspec.Struct, frozen=True):
    """What a front must know before it exports or imports a prefix, as msgpack."""

    layout: str
    """How the bytes of a block are to be read. Blocks move only between engines with the same layout."""
    identity: str
    """Of the model's weights and number format."""
    block_tokens: int
    part_blocks: int
    """Blocks of each group in one part, at most."""
    part_bytes: int
    """Of the blocks of a whole part."""
    refused: str = ""
    """Why this engine's blocks cannot leave it."""
    tokens: bytes | None = None
    """Of the handle that was asked for, as int32 bytes; None if there is none."""
    salt: bytes = b""
    ttl_s: float = 0.0


class PartOfPrefix(msgspec.Struct, frozen=True, tag="part_of_prefix"):
    """Read a part of a prefix's blocks, or, with `blocks`, write it. Answered by one `Reply` with a `PartAnswer`."""

    front: int
    query_id: int
    owner: str
    salt: bytes
    tokens: bytes
    """Of the whole prefix, as int32 bytes: whole blocks."""
    first: int
    """Column."""
    count: int
    """0: only how many leading columns are cached."""
    blocks: bytes | None = None
    has: tuple[tuple[bool, ...], ...] = ()
    """With `blocks`: by group, which columns of the part have a block."""
    retain: Retain | None = None
    """Keep the prefix under this handle first."""


class PartAnswer(msgspec.Struct, frozen=True):
    """As msgpack."""

    failure: str = ""
    is_full: bool = False
    """The failure is a lack of room."""
    columns: int = 0
    """Leading columns that are cached, where `count` was 0."""
    blocks: bytes = b""
    has: tuple[tuple[bool, ...], ...] = ()
