"""Files that are read and written at offsets, and the lock that gives a folder one owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

LOCK_POLL_S = 0.05


class BlockFile(Protocol):
    """Raises OSError. May be used by several threads at once."""

    def read(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Fill all parts, one after the other."""

    def write(self, offset: int, parts: Sequence[memoryview]) -> None: ...

    def sync(self) -> None:
        """Return once the disk has what was written."""

    def close(self) -> None: ...


class OpenFile:
    """A `BlockFile` of the operating system."""

    def __init__(self, path: Path, size: int, *, is_writable: bool) -> None:
        """`size`: the file never grows beyond it, and is cut if it is longer."""
        self._path = path
        self._size = size
        self._is_writable = is_writable
        flags = os.O_RDWR | os.O_CREAT if is_writable else os.O_RDONLY
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)  # What it holds tells the prompts.
        if is_writable and os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)

    def read(self, offset: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            done = 0
            while done < len(part):
                count = os.preadv(self._fd, [part[done:]], offset + done)
                if not count:
                    raise OSError(f"{self._path} ends early")
                done += count
            offset += len(part)

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        if not self._is_writable:
            raise OSError(f"{self._path} is read-only")
        for part in parts:
            if offset + len(part) > self._size:
                raise OSError(f"{self._path} would exceed its size")
            done = 0
            while done < len(part):
                done += os.pwritev(self._fd, [part[done:]], offset + done)
            offset += len(part)

    def sync(self) -> None:
        if self._is_writable:
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class FolderLock:
    """Held until it is closed, or its process ends."""

    def __init__(self, folder: Path, patience_s: float = 0.0) -> None:
        """Raises BlockingIOError if somebody else holds it for so long, and another OSError if the folder cannot be
        used."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.is_writable = True
        except OSError:
            self._fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
            self.is_writable = False
        until = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                    os.close(self._fd)
                    raise
            time.sleep(LOCK_POLL_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
