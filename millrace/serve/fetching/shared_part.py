"""Memory that two replicas of one machine share: a part of a prompt's blocks travels there instead of in an answer.

The asker makes a file in `/dev/shm` that only its own user may open, and names it in its question. The source writes
the part there, and its sealed answer has the checksum. A source that cannot open it (another user or container)
sends the bytes in its answer.
"""

from __future__ import annotations

import hmac
import mmap
import os
import re
import secrets
import socket
import stat
import time
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"millrace-kv-[0-9a-f]{32}")
_STALE_S = 60.0
"""A fetch is over long before. What is older was left by a process that was killed."""


def is_on_this_machine(url: str) -> bool:
    """Whether the URL's address is this machine's own. Other host names than `localhost` are not looked up."""
    host = urlsplit(url).hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if host != "localhost" and not (":" in host or host.replace(".", "").isdigit()):
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


class SharedPart:
    """One part at a time. Raises OSError where there is no such memory, or not enough."""

    def __init__(self, size: int, folder: Path = FOLDER) -> None:
        _remove_stale(folder)
        self.name = f"millrace-kv-{secrets.token_hex(16)}"
        self._path = folder / self.name
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            self._memory = mmap.mmap(file, size)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(file)

    def read(self, size: int, checksum: bytes) -> bytes | None:
        """What was written; None if it is not what the source meant. It is copied before it is checked."""
        data = self._memory[:size] if size <= len(self._memory) else b""
        return data if len(data) == size and hmac.compare_digest(_checksum(data), checksum) else None

    def close(self) -> None:
        self._memory.close()
        self._path.unlink(missing_ok=True)


def write_shared(name: str, data: bytes, folder: Path = FOLDER) -> bytes | None:
    """The checksum of what was written; None if there is no such file, or it is not private to this user."""
    if not _NAME.fullmatch(name):
        return None
    try:
        file = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(file)
        is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not is_private or found.st_size < len(data) or os.pwrite(file, data, 0) != len(data):
            return None
    except OSError:
        return None
    finally:
        os.close(file)
    return _checksum(data)


def _checksum(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def _remove_stale(folder: Path) -> None:
    oldest = time.time() - _STALE_S
    for entry in os.scandir(folder):
        try:
            if _NAME.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                os.unlink(entry.path)
        except OSError:
            pass  # Somebody else's, or gone.
