"""The keys of KV blocks, computed from token ids as replicas do (docs/replica-api.md): a chained hash per block."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

SHOWN_DIGITS = 16
"""Hex digits of a key in events."""
_BYTES = 16
_ROOT = b"millrace-kv-v1"


def block_keys(token_ids: Sequence[int], block_tokens: int, salt: bytes = b"") -> list[str]:
    """Keys of the whole blocks of a prompt."""
    parent = blake2b(salt, digest_size=_BYTES, key=_ROOT).digest()
    found = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        tokens = struct.pack(f"<{block_tokens}i", *token_ids[start : start + block_tokens])
        parent = blake2b(parent + tokens, digest_size=_BYTES).digest()
        found.append(parent.hex()[:SHOWN_DIGITS])
    return found
