"""What happened to canaries, line by line in a file, so that they go on after a restart of the engine or the server.

A line is written at once, in a few microseconds: an engine that is killed in its next step leaves the versions whose
requests were open.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from millrace.link.adapter_messages import AddCanary
from millrace.params.classes import FinishReason

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""A longer file is written anew."""


class KeptVersion(msgspec.Struct, omit_defaults=True):
    """Counts of one version, as `_Version` has them."""

    ended: int = 0
    failed: int = 0
    seconds: list[float] = []


class KeptCanary(msgspec.Struct, omit_defaults=True):
    """All that is known of a canary."""

    asked: AddCanary
    state: str
    why: str = ""
    due: float = 0.0
    old_path: str = ""
    """Where the adapter was when the new version took its place."""
    old: KeptVersion = msgspec.field(default_factory=KeptVersion)
    new: KeptVersion = msgspec.field(default_factory=KeptVersion)


class Line(msgspec.Struct, omit_defaults=True):
    """One of these."""

    canary: KeptCanary | None = None
    """It began or ended, or the file was written anew."""
    forgotten: str = ""
    """The adapter of this name was removed or replaced."""
    taken: tuple[str, int, bool] | None = None
    """A request began: its adapter, its id, whether it is for the new version."""
    ended: tuple[int, FinishReason, float | None] | None = None
    """A request ended: its id, why, seconds for a token."""
    is_again: bool = False
    """It was `taken` before, and does not count in the canary's share again."""
    lost: tuple[str, int, bool] | None = None
    """As `taken`, of a request whose engine died; the next one may continue it."""
    is_stopped: bool = False
    """The engine stopped in order, and its requests with it."""


class CanaryJournal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._num_bytes = 0
        self._is_given_up = False

    @property
    def is_long(self) -> bool:
        return self._num_bytes > MAX_BYTES

    def read(self) -> list[Line]:
        """Up to the first line that is damaged; the last one may have been cut."""
        if not self.path.exists() or not self._open():
            return []
        found: list[Line] = []
        for line in self.path.read_bytes().splitlines():
            try:
                found.append(msgspec.json.decode(line, type=Line))
            except msgspec.MsgspecError as error:
                log.warning("The canaries in %s cannot be read from line %d on: %s", self.path, len(found) + 1, error)
                break
        return found

    def write(self, line: Line) -> None:
        self._append(msgspec.json.encode(line) + b"\n")

    def write_anew(self, lines: Iterable[Line]) -> None:
        if not self._open() or self._file is None:
            return
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        part = self.path.with_suffix(".part")
        try:
            part.write_bytes(data)
            os.replace(part, self.path)
        except OSError as error:
            self._give_up(error)
            return
        self._close()
        self._open()

    def close(self) -> None:
        self._close()

    def _append(self, data: bytes) -> None:
        if not self._open() or self._file is None:
            return
        try:
            os.write(self._file, data)
            self._num_bytes += len(data)
        except OSError as error:
            self._give_up(error)

    def _open(self) -> bool:
        """False if the file cannot be used, which is said once."""
        if self._file is not None or self._is_given_up:
            return not self._is_given_up
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._num_bytes = os.fstat(self._file).st_size
        except BlockingIOError:
            self._give_up("another server keeps its own there. Give this one another --name")
        except OSError as error:
            self._give_up(error)
        return not self._is_given_up

    def _give_up(self, why: object) -> None:
        self._is_given_up = True
        self._close()
        log.warning("Canaries will not go on after a restart: %s cannot be used: %s", self.path, why)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
