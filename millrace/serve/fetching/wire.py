"""What replicas send each other: a question about a prompt's blocks, and one part of them with its checksum."""

from __future__ import annotations

import hmac
from hashlib import blake2b

import msgspec

FROM_HEADER = "X-Millrace-Kv-From"
"""The URL of a replica that has more of the prompt's blocks."""
FETCH_HEADER = "X-Millrace-Kv-Fetch"
"""What became of it, in the answer to the gateway."""
OVERHEAD_BYTES = 1 << 16
"""Bytes of an answer beside its blocks, at most."""
CHECKSUM_BYTES = 32


class BlocksWanted(msgspec.Struct, frozen=True):
    salt: bytes
    tokens: bytes
    """Of the whole prefix, as int32 bytes: whole blocks."""
    first: int = 0
    """Column."""
    count: int = 0
    """0: only how many leading columns there are."""
    shared: str = ""
    """Name of memory that the asker shares with a source on its machine."""


class BlocksGiven(msgspec.Struct, frozen=True):
    identity: str
    """Of the model's weights and number format."""
    layout: str
    block_tokens: int
    columns: int = 0
    """Leading columns of the prefix that are cached; only where `count` was 0."""
    has: tuple[tuple[bool, ...], ...] = ()
    blocks: bytes = b""
    failure: str = ""
    shared: bytes = b""
    """If the blocks are in the shared memory: their checksum."""
    shared_bytes: int = 0


def sealed(wanted: bytes, given: bytes, key: str) -> bytes:
    """An answer with its checksum, which also covers the question. Only who has the gateway's key can make it."""
    return given + _checksum(wanted, given, key)


def opened(wanted: bytes, data: bytes, key: str) -> bytes | None:
    """The answer; None if it is not what was sent."""
    given, found = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    return given if hmac.compare_digest(found, _checksum(wanted, given, key)) else None


def _checksum(wanted: bytes, given: bytes, key: str) -> bytes:
    secret = blake2b(key.encode(errors="surrogateescape"), digest_size=32).digest()
    asked = blake2b(wanted, digest_size=32).digest()
    return blake2b(asked + blake2b(given, digest_size=32).digest(), digest_size=CHECKSUM_BYTES, key=secret).digest()
