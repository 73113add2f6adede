"""How blocks are stored: as they are with a checksum, or encrypted under a key of their owner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from millrace.engine.disk.owner_keys import SEAL_BYTES, OwnerKeys
from millrace.plan.planner.block_names import OWNER_BYTES, mark_in

CHECKSUM_BYTES = 16
_OF_NAME = b"name"
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)

Parts = Sequence[memoryview]


class BlockForm(Protocol):
    extra_bytes: int
    """By how much a stored block is longer than it is."""
    extra_name_bytes: int

    def store(self, name: bytes, parts: Parts) -> tuple[bytes, Parts, bytes]:
        """Name, content and checksum as they are stored. Raises OSError."""

    def name_of(self, stored: bytes) -> bytes | None:
        """None if it is unreadable."""

    def load(self, name: bytes, parts: Parts, checksum: bytes, read: Callable[[Parts], None]) -> bool:
        """Fill the parts with what `read` reads. False if that is not the block with this name."""

    def forget(self, mark: bytes) -> None:
        """What was stored of the owner with this mark cannot be read any longer, if the form can do that. Raises
        OSError."""


class PlainForm:
    extra_bytes = extra_name_bytes = 0

    def store(self, name: bytes, parts: Parts) -> tuple[bytes, Parts, bytes]:
        return name, parts, _checksum(name, parts)

    def name_of(self, stored: bytes) -> bytes | None:
        return stored

    def load(self, name: bytes, parts: Parts, checksum: bytes, read: Callable[[Parts], None]) -> bool:
        read(parts)
        return _checksum(name, parts) == checksum

    def forget(self, mark: bytes) -> None: ...


class EncryptedForm:
    """AES-256-GCM with random nonces, under a key of each block's owner (`owner_keys.py`). A content is bound to its
    name, so it needs no further checksum. Names are encrypted twice: outside, with the owner's mark, under the
    operator's key."""

    extra_bytes = SEAL_BYTES
    extra_name_bytes = 2 * SEAL_BYTES + OWNER_BYTES

    def __init__(self, keys: OwnerKeys) -> None:
        self._keys = keys

    def store(self, name: bytes, parts: Parts) -> tuple[bytes, Parts, bytes]:
        mark = mark_in(name)
        own = self._keys.make(mark)
        content = own.seal(b"".join(parts), name)
        return self._keys.operator.seal(mark + own.seal(name, _OF_NAME), _OF_NAME), [memoryview(content)], _NO_CHECKSUM

    def name_of(self, stored: bytes) -> bytes | None:
        inner = self._keys.operator.open(stored, _OF_NAME)
        own = None if inner is None else self._keys.find(inner[:OWNER_BYTES])
        return None if own is None or inner is None else own.open(inner[OWNER_BYTES:], _OF_NAME)

    def load(self, name: bytes, parts: Parts, checksum: bytes, read: Callable[[Parts], None]) -> bool:
        sealed = bytearray(sum(map(len, parts)) + self.extra_bytes)
        read([memoryview(sealed)])
        own = self._keys.find(mark_in(name))
        content, at = None if own is None else own.open(sealed, name), 0
        if content is None:
            return False
        for part in parts:
            part[:] = memoryview(content)[at : at + len(part)]
            at += len(part)
        return True

    def forget(self, mark: bytes) -> None:
        self._keys.destroy(mark)


def _checksum(name: bytes, parts: Parts) -> bytes:
    state = hashlib.blake2b(name, digest_size=CHECKSUM_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()
