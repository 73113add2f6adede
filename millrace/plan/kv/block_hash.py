"""Names for KV blocks: a chained hash of everything that decides a block's content.

The root is fixed, so names are portable between processes, tiers and replicas.
"""

from __future__ import annotations

from hashlib import blake2b

HASH_BYTES = 16
ROOT = b"millrace-kv-v1"


def root_hash(salt: bytes) -> bytes:
    """The parent of a first block; the salt keeps adapters and tenants apart."""
    return blake2b(salt, digest_size=HASH_BYTES, key=ROOT).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """`tokens` are the block's token ids as int32 bytes."""
    return blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
