"""Rank 0's view of the shares that the other ranks of a split model keep on a disk.

Every rank stores its part of a block in the same slot under the same name. A copy has ended once it has on all of them,
and fails if it fails on one: a block is there only if all ranks have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from queue import Empty, SimpleQueue

import msgspec

from millrace.run.ranks.recorder import DiskWork, StepRecorder


class DiskReply(msgspec.Struct, frozen=True, array_like=True):
    """What another rank tells: first what it has, with number 0, then the end of each work."""

    number: int
    seconds: float = 0.0
    error: str = ""
    stored: dict[int, bytes] | None = None
    """By slot a digest of the block's name. None with number 0: the rank cannot use its disk."""


Replies = SimpleQueue[tuple[int, bytes]]
"""The rank, and a `DiskReply` as bytes."""
_decoder = msgspec.msgpack.Decoder(DiskReply)


def digests_of(stored: Iterable[tuple[int, bytes]]) -> dict[int, bytes]:
    """`stored`: slot and name of each block."""
    return {slot: hashlib.blake2b(name, digest_size=16).digest() for slot, name in stored}


class OtherDisks:
    """Used by the engine's thread."""

    def __init__(self, steps: StepRecorder, replies: Replies, num_others: int) -> None:
        """`replies`: has the first one of each rank already."""
        self._steps = steps
        self._replies = replies
        self._num_others = num_others
        self.shares: list[dict[int, bytes] | None] = []
        self._open: dict[int, _Elsewhere] = {}
        self._take()

    @property
    def are_usable(self) -> bool:
        return len(self.shares) == self._num_others and None not in self.shares

    def common(self, stored: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Those of rank 0's blocks, in its order, of which every rank has its part."""
        shares = [share or {} for share in self.shares]
        return [
            (slot, name)
            for slot, name in stored
            for digest in digests_of([(slot, name)]).values()
            if all(share.get(slot) == digest for share in shares)
        ]

    def start(self, work: DiskWork) -> _Elsewhere:
        pending = self._open[work.number] = _Elsewhere(self, self._num_others)
        self._steps.disk(work)
        return pending

    def _take(self) -> None:
        while True:
            try:
                rank, data = self._replies.get_nowait()
            except Empty:
                return
            reply = _decoder.decode(data)
            if not reply.number:
                self.shares.append(reply.stored)
                continue
            pending = self._open[reply.number]
            pending.num_left -= 1
            pending.seconds = max(pending.seconds, reply.seconds)
            pending.error = pending.error or (reply.error and f"rank {rank}: {reply.error}")
            if not pending.num_left:
                del self._open[reply.number]

    def look(self) -> None:
        """Take the replies that are there."""
        self._take()


class _Elsewhere:
    """A `PendingCopy` of the other ranks. The engine waits for it once it is done."""

    def __init__(self, disks: OtherDisks, num_left: int) -> None:
        self._disks = disks
        self.num_left = num_left
        self.seconds = 0.0
        self.error = ""

    def done(self) -> bool:
        self._disks.look()
        return not self.num_left

    def wait(self) -> float:
        if self.num_left:
            raise RuntimeError("the other ranks have not ended this copy")
        if self.error:
            raise OSError(self.error)
        return self.seconds
