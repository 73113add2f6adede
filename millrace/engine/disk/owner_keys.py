"""Keys of a disk: the operator's, and a random one for each owner of blocks, which lies beside the blocks, encrypted
under the operator's. Who destroys an owner's key makes all its blocks unreadable, copies of the files included.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

from millrace.errors import ConfigError

NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""By how much sealing makes a content longer."""
KEY_BYTES = MIN_KEY_BYTES = 32


class Seal:
    """AES-256-GCM with random nonces."""

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
        self._cipher = AESGCM(key)
        self._invalid = InvalidTag

    def seal(self, content: bytes, about: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, about)

    def open(self, sealed: bytes | bytearray, about: bytes) -> bytes | None:
        """None if it was sealed with another key or is about something else."""
        view = memoryview(sealed)
        try:
            return self._cipher.decrypt(bytes(view[:NONCE_BYTES]), view[NONCE_BYTES:], about)
        except self._invalid:
            return None


class OwnerKeys:
    """May be used by several threads at once, and its folder by several processes."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        """`folder`: has a file for each owner. `secret`: the operator's key. Raises ConfigError."""
        self._folder = folder
        self._secret = secret
        self.operator = Seal(secret)
        self._lock = threading.Lock()
        self._known: dict[bytes, Seal] = {}

    def find(self, mark: bytes) -> Seal | None:
        """The key of the owner with this mark; None if there is none, or none that can be read."""
        with self._lock:
            if mark not in self._known:
                try:
                    wrapped = self._path(mark).read_bytes()
                except OSError:
                    return None
                key = self.operator.open(wrapped, mark)
                if key is None:
                    return None
                self._known[mark] = Seal(key)
            return self._known[mark]

    def make(self, mark: bytes) -> Seal:
        """The same, made if there is none. Raises OSError."""
        found = self.find(mark)
        if found is not None:
            return found
        path, key = self._path(mark), os.urandom(KEY_BYTES)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            _write(part, self.operator.seal(key, mark))
            with contextlib.suppress(FileExistsError):
                os.link(part, path)  # Another process may have been first.
        finally:
            part.unlink(missing_ok=True)
        _sync(self._folder)
        found = self.find(mark)
        if found is None:
            raise OSError(f"{path} is damaged: remove it, and with it what was stored under it")
        return found

    def destroy(self, mark: bytes) -> None:
        """Raises OSError."""
        path = self._path(mark)
        with self._lock:
            self._known.pop(mark, None)
            if path.exists():
                _write(path, bytes(SEAL_BYTES + KEY_BYTES))
                path.unlink(missing_ok=True)
                _sync(self._folder)

    def _path(self, mark: bytes) -> Path:
        """Who lists the folder learns how many owners there are, and nothing of their names."""
        return self._folder / hashlib.blake2b(mark, key=self._secret, digest_size=16).hexdigest()


def _write(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, content)
        os.fsync(file)
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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
    return hashlib.blake2b(secret, digest_size=KEY_BYTES, person=b"millrace-disk").digest()
