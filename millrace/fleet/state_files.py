"""What a running fleet writes: its state, its events, the list of replicas that the gateway reads, and a lock.

The lock is held while `millrace up` runs, so a state that a killed one left is not taken for a running fleet.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from millrace.errors import Conflict, NotFound


class MemberState(msgspec.Struct):
    name: str
    kind: str
    """replica or gateway."""
    url: str
    state: str
    """starting, ready, draining, waiting (to be started again) or stopped."""
    pid: int = 0
    restarts: int = 0
    since: float = 0.0
    """Unix time of the last change."""
    reason: str = ""
    """Why it was last restarted."""


class FleetState(msgspec.Struct):
    pid: int
    file: str
    started: float
    members: list[MemberState]
    is_rolling: bool = False


class StateFiles:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state, self.events = directory / "state.json", directory / "events.jsonl"
        self.replicas, self._lock = directory / "replicas.toml", directory / "lock"
        self._held: IO[str] | None = None

    def take(self) -> None:
        """Become the one that runs this fleet."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = self._lock.open("a")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            raise Conflict(
                f"This fleet is running already ({self.directory}); see `millrace status`, or end it with"
                " `millrace down`."
            ) from None
        self._held = held

    def give_up(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def is_running(self) -> bool:
        try:
            with self._lock.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def read(self) -> FleetState:
        """The state of the running fleet."""
        if not self.is_running:
            raise NotFound(f"No fleet runs in {self.directory}; start it with `millrace up`.")
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=FleetState)
        except (OSError, msgspec.DecodeError) as error:
            raise NotFound(f"The fleet in {self.directory} is just starting or ending; try again.") from error

    def write(self, state: FleetState) -> None:
        replace_file(self.state, msgspec.json.encode(state))

    def note(self, member: str, what: str, **facts: Any) -> None:
        """Append an event. Events of earlier runs are kept, for `millrace postmortem`."""
        line = {"time": time.time(), "member": member, "event": what, **facts}
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def last_event(self, what: str) -> float | None:
        """When it last happened, in Unix time."""
        if not self.events.exists():
            return None
        lines = self.events.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            if f'"event": "{what}"' in line:
                return float(json.loads(line)["time"])
        return None

    def write_replicas(self, gateway: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]]) -> None:
        """The gateway's settings. It reads them again when they change."""
        lines = ["# Written by `millrace up`. The gateway reads it again when it changes.", "[gateway]"]
        lines += [f"{key} = {_toml(value)}" for key, value in gateway.items()]
        for replica in replicas:
            lines += ["", "[[replicas]]", *(f"{key} = {_toml(value)}" for key, value in replica.items())]
        data = ("\n".join(lines) + "\n").encode()
        if not self.replicas.exists() or self.replicas.read_bytes() != data:
            replace_file(self.replicas, data)


def _toml(value: Any) -> str:
    """Strings, numbers, booleans and lists are written as in JSON; tables on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def replace_file(path: Path, data: bytes) -> None:
    """A reader sees the old content or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)
