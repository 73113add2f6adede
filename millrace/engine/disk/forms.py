"""How blocks are stored: as they are with a checksum, or encrypted under a key of the operator."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from millrace.errors import ConfigError

CHECKSUM_BYTES = 16
NONCE_BYTES, TAG_BYTES = 12, 16
MIN_KEY_BYTES = 32
_OF_NAME = b"name"
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)

Parts = Sequence[memoryview]


class BlockForm(Protocol):
    extra_bytes: int
    """By how much a stored block, and a stored name, is longer than it is."""

    def store(self, name: bytes, parts: Parts) -> tuple[bytes, Parts, bytes]:
        """Name, content and checksum as they are stored."""

    def name_of(self, stored: bytes) -> bytes | None:
        """None if it is unreadable."""

    def load(self, name: bytes, parts: Parts, checksum: bytes, read: Callable[[Parts], None]) -> bool:
        """Fill the parts with what `read` reads. False if that is not the block with this name."""


class PlainForm:
    extra_bytes = 0

    def store(self, name: bytes, parts: Parts) -> tuple[bytes, Parts, bytes]:
        return name, parts, _checksum(name, parts)

    def name_of(self, stored: bytes) -> bytes | None:
        return stored

    def load(self, name: bytes, parts: Parts, checksum: bytes, read: Callable[[Parts], None]) -> bool:
        read(parts)
        return _checksum(name, parts) == checksum


class EncryptedForm:
    """AES-256-GCM with random nonces. A content is bound to its name, so it needs no further checksum."""

    extra_bytes = NONCE_BYTES + TAG_BYTES

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes. Raises ConfigError without the package that has the cipher."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "--kv-disk-key needs the package cryptography: pip install 'cryptography>=44'.",
                param="memory.kv_disk_key",
            ) from error
        self._cipher, self._invalid = AESGCM(key), InvalidTag

    def store(self, name: bytes, parts: Parts) -> tuple[bytes, Parts, bytes]:
        sealed = self._seal(b"".join(parts), name)
        return self._seal(name, _OF_NAME), [memoryview(sealed)], _NO_CHECKSUM

    def name_of(self, stored: bytes) -> bytes | None:
        return self._open(stored, _OF_NAME)

    def load(self, name: bytes, parts: Parts, checksum: bytes, read: Callable[[Parts], None]) -> bool:
        sealed = bytearray(sum(map(len, parts)) + self.extra_bytes)
        read([memoryview(sealed)])
        content, at = self._open(sealed, name), 0
        if content is None:
            return False
        for part in parts:
            part[:] = memoryview(content)[at : at + len(part)]
            at += len(part)
        return True

    def _seal(self, content: bytes, about: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, about)

    def _open(self, sealed: bytes | bytearray, about: bytes) -> bytes | None:
        view = memoryview(sealed)
        try:
            return self._cipher.decrypt(bytes(view[:NONCE_BYTES]), view[NONCE_BYTES:], about)
        except self._invalid:
            return None


def read_disk_key(path: str) -> bytes:
    """Raises ConfigError."""
    try:
        secret = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--kv-disk-key {path} cannot be read: {error.strerror}.", param="memory.kv_disk_key"
        ) from error
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(
            f"--kv-disk-key {path} has {len(secret)} bytes; write at least {MIN_KEY_BYTES} random ones into it.",
            param="memory.kv_disk_key",
        )
    return hashlib.blake2b(secret, digest_size=32, person=b"millrace-disk").digest()


def _checksum(name: bytes, parts: Parts) -> bytes:
    state = hashlib.blake2b(name, digest_size=CHECKSUM_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()
