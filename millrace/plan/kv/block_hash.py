"""Block hashes: a chained hash over everything that determines a block's content, and a mark of whose block it is.

The root is a constant, so equal blocks have equal hashes in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from millrace.plan.planner.block_names import HASH_BYTES, OWNER_BYTES

ROOT = b"millrace-kv-v1"
NOBODY = bytes(OWNER_BYTES)
"""Mark of blocks that belong to no tenant alone."""
MARK = b"\0"
"""Before and after the name of a tenant at the beginning of a salt, and after a gateway's salt for its tenant, which
stands for the name: see `serve/tenancy/cache_scope.py`."""


def root_hash(salt: bytes) -> bytes:
    """The parent hash of a first block. Requests with different salts never share blocks."""
    name, mark, _ = salt.removeprefix(MARK).partition(MARK)
    return blake2b(salt, digest_size=HASH_BYTES, key=ROOT).digest() + owner_mark(name if mark else b"")


def owner_mark(name: bytes) -> bytes:
    """The last bytes in the hashes of all blocks that are this tenant's own."""
    return blake2b(name, digest_size=OWNER_BYTES, key=ROOT).digest() if name else NOBODY


_EMPTY = blake2b(digest_size=HASH_BYTES)


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """`tokens` are the block's token ids as int32 bytes."""
    state = _EMPTY.copy()  # A third faster than giving the options again.
    state.update(parent[:HASH_BYTES])
    state.update(tokens)
    return state.digest() + parent[HASH_BYTES:]


def block_hashes(parent: bytes, tokens: Sequence[bytes]) -> list[bytes]:
    """`block_hash` of blocks that follow each other."""
    state, mark, hashes, copy = parent[:HASH_BYTES], parent[HASH_BYTES:], [], _EMPTY.copy
    for own in tokens:
        hashed = copy()
        hashed.update(state)
        hashed.update(own)
        state = hashed.digest()
        hashes.append(state + mark)
    return hashes
