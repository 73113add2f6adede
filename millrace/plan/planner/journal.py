"""Which blocks entered or left the cache since the journal was last taken. Kept only while somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from millrace.plan.step import Location

Change = Literal["filled", "evicted"]


@dataclass(slots=True)
class Run:
    """Changes of one kind, in order."""

    kind: Change
    tier: Location
    digests: list[bytes] = field(default_factory=list)


class KvJournal:
    def __init__(self) -> None:
        self._runs: list[Run] = []

    def note(self, kind: Change, tier: Location, digest: bytes) -> None:
        runs = self._runs
        if not runs or runs[-1].kind != kind or runs[-1].tier != tier:
            runs.append(Run(kind, tier))
        runs[-1].digests.append(digest)

    def take(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs


class WatchedBlocks(Protocol):
    """The cached blocks of one tier."""

    journal: KvJournal | None
    """Notes the blocks of group 0; None while nobody reads it."""

    def digests(self) -> list[bytes]:
        """Hashes of the blocks of group 0 that can be found."""
