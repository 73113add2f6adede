"""Which Millrace servers run on this machine: each writes a small file while it serves."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.config import cache_dir


@dataclass(frozen=True, slots=True)
class RunningServer:
    pid: int
    started_ticks: int
    """Start of the process in clock ticks since boot: tells it from a later process with the same id."""
    since: float
    """Seconds since the epoch."""
    model: str
    url: str
    device: str


def running_servers() -> list[RunningServer]:
    """Servers whose process is alive; files of dead ones are deleted."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        try:
            server = RunningServer(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if _started_ticks(server.pid) == server.started_ticks:
            found.append(server)
        else:
            path.unlink(missing_ok=True)
    return found


@contextlib.contextmanager
def announced() -> Iterator[Announcement]:
    """Gives the object with which a server makes itself known; forgets the server at the end."""
    announcement = Announcement(_folder() / f"{os.getpid()}.json")
    try:
        yield announcement
    finally:
        announcement.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Announcement:
    path: Path

    def write(self, model: str, url: str, device: str) -> None:
        """A server also runs where this file cannot be written; `millrace ps` then does not list it."""
        server = RunningServer(os.getpid(), _started_ticks(os.getpid()), time.time(), model, url, device)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(asdict(server)), encoding="utf-8")


def _started_ticks(pid: int) -> int:
    """0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _folder() -> Path:
    return cache_dir() / "run"
