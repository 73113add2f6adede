"""Tells fronts which KV blocks enter and leave the cache, while one of them listens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from millrace.link.channel import EngineChannel
from millrace.link.messages import KV_KEY_BYTES, KvEvents
from millrace.plan.planner.journal import KvJournal, WatchedBlocks
from millrace.plan.step import Location

SEND_EVERY_S = 0.05
MAX_KEYS = 1 << 16
"""Keys in one message."""


class KvEventFeed:
    def __init__(self, channel: EngineChannel, tiers: Mapping[Location, WatchedBlocks]) -> None:
        self._channel = channel
        self._tiers = tiers
        self._journal: KvJournal | None = None
        self._fronts: set[int] = set()
        self._sent_at = 0.0

    def watch(self, front: int, *, is_on: bool) -> None:
        """Each call with `is_on` is answered with a snapshot."""
        self.flush()  # Before the snapshot, which contains these changes.
        (self._fronts.add if is_on else self._fronts.discard)(front)
        if not self._fronts:
            self._use(None)
            return
        if self._journal is None:
            self._use(KvJournal())
        if is_on:
            for event in self._snapshot():
                self._channel.send(front, event)

    def _use(self, journal: KvJournal | None) -> None:
        self._journal = journal
        for tier in self._tiers.values():
            tier.journal = journal

    def _snapshot(self) -> Iterator[KvEvents]:
        for name, tier in self._tiers.items():
            yield from _events("snapshot", name, tier.digests())

    def on_step(self, now: float) -> None:
        if self._journal is not None and now - self._sent_at >= SEND_EVERY_S:
            self._sent_at = now
            self.flush()

    def flush(self) -> None:
        for run in self._journal.take() if self._journal is not None else ():
            for event in _events(run.kind, run.tier, run.digests):
                for front in self._fronts:
                    self._channel.send(front, event)


def _events(
    kind: Literal["snapshot", "filled", "evicted"], tier: Location, digests: Sequence[bytes]
) -> Iterator[KvEvents]:
    """A long snapshot continues as blocks that were filled."""
    for start in range(0, max(1, len(digests)), MAX_KEYS):
        keys = b"".join(digest[:KV_KEY_BYTES] for digest in digests[start : start + MAX_KEYS])
        yield KvEvents("filled" if start and kind == "snapshot" else kind, tier, keys)
