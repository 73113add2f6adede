"""Names under which blocks are stored: KV group, hash and tokens. The end of a hash marks whose block it is."""

from __future__ import annotations

HASH_BYTES, OWNER_BYTES = 16, 8
DIGEST_BYTES = HASH_BYTES + OWNER_BYTES


def name_of(key: tuple[int, bytes], tokens: bytes) -> bytes:
    """What is stored beside a block. `key`: a `CacheKey`."""
    return bytes((key[0],)) + key[1] + tokens


def name_bytes(block_size: int) -> int:
    return 1 + DIGEST_BYTES + 4 * block_size


def mark_in(name: bytes) -> bytes:
    """Of the block's owner, as `owner_mark` makes it."""
    return name[1 + HASH_BYTES : 1 + DIGEST_BYTES]


def read_name(name: bytes) -> tuple[tuple[int, bytes], bytes]:
    end = 1 + DIGEST_BYTES
    return (name[0], name[1:end]), name[end:]
