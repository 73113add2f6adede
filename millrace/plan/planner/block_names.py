"""Names under which blocks are stored: KV group, hash, tokens, and the hash of the block before.

The end of a hash marks whose block it is.
"""

from __future__ import annotations

HASH_BYTES, OWNER_BYTES = 16, 8
DIGEST_BYTES = HASH_BYTES + OWNER_BYTES

_UNKNOWN = bytes(HASH_BYTES)
_NONE = b"\xff" * HASH_BYTES


def first_of(digest: bytes) -> bytes:
    """Stands for the hash before this one if that is a root, which nobody knows after a restart."""
    return _NONE + digest[HASH_BYTES:]


def is_first_of(parent: bytes) -> bool:
    return parent.startswith(_NONE)


def name_of(key: tuple[int, bytes], tokens: bytes, parent: bytes | None) -> bytes:
    """What is stored beside a block. `key`: a `CacheKey`. `parent`: hash of the block before it, of the same owner."""
    return bytes((key[0],)) + key[1] + tokens + (_UNKNOWN if parent is None else parent[:HASH_BYTES])


def name_bytes(block_size: int) -> int:
    return 1 + DIGEST_BYTES + 4 * block_size + HASH_BYTES


def mark_in(name: bytes) -> bytes:
    """Of the block's owner, as `owner_mark` makes it."""
    return name[1 + HASH_BYTES : 1 + DIGEST_BYTES]


def read_name(name: bytes) -> tuple[tuple[int, bytes], bytes, bytes | None]:
    """Key, tokens and parent."""
    end = 1 + DIGEST_BYTES
    key, tokens, parent = (name[0], name[1:end]), name[end:-HASH_BYTES], name[-HASH_BYTES:]
    return key, tokens, None if parent == _UNKNOWN else parent + key[1][HASH_BYTES:]
