"""Copies between host memory and a disk, in threads of their own: no step waits for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from millrace.engine.copies import Copier, PendingCopy
from millrace.engine.disk.others import OtherDisks
from millrace.engine.disk.store import BlockStore
from millrace.plan.step import BlockCopies
from millrace.run.device.host_blocks import HostBlocks
from millrace.run.ranks.recorder import DiskWork, DiskWorkKind

NUM_READERS = 2
WRITER_NICENESS = 10
"""Writes take no core from the steps."""
CLOSE_S = 2.0
"""Longest wait for the threads at the end. The process does not wait for them either."""
OnEnd = Callable[[float, Exception | None], None]
"""Told the seconds that the work took, and why it failed."""


class _DiskCopy:
    """A `PendingCopy`."""

    def __init__(self, work: Callable[[], None], on_end: OnEnd | None = None) -> None:
        self._work = work
        self._on_end = on_end
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._seconds = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self._work()
        except Exception as error:
            self._error = error
        self._seconds = time.perf_counter() - began
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self._seconds, self._error)

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> float:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._seconds


class DiskThreads:
    """Move blocks between one process's host memory and its share of the disk."""

    def __init__(self, store: BlockStore, host: Sequence[HostBlocks]) -> None:
        self._store = store
        self._host = host
        self._reads: queue.SimpleQueue[_DiskCopy | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_DiskCopy | None] = queue.SimpleQueue()
        parts = [(self._reads, 0)] * NUM_READERS + [(self._writes, WRITER_NICENESS)]
        self._threads = [threading.Thread(target=_serve, args=part, name="kv-disk", daemon=True) for part in parts]
        for thread in self._threads:
            thread.start()

    def start(self, work: DiskWork, before: Sequence[PendingCopy] = (), on_end: OnEnd | None = None) -> PendingCopy:
        """`before`: copies of the same host memory that end first. `on_end` is called in a thread of the disk."""

        def move() -> None:
            for copy in before:
                copy.wait()
            if work.kind == "forget":
                self._store.forget(work.names[0])
                return
            run = self._store.write if work.kind == "write" else self._store.read
            for slot, place, name in zip(work.slots, work.places, work.names, strict=True):
                run(slot, name, [host.bytes_of(place) for host in self._host])

        pending = _DiskCopy(move, on_end)
        (self._reads if work.kind == "read" else self._writes).put(pending)
        return pending

    def close(self) -> None:
        """No work follows. A disk that hangs keeps its threads and its lock until the process ends."""
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self._writes.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()


class DiskCopier:
    """Sends copies to and from the disk to its threads, and all others to `near`."""

    def __init__(
        self, store: BlockStore, host: Sequence[HostBlocks], near: Copier, others: OtherDisks | None = None
    ) -> None:
        """`host`: the host memory that `near` copies to and from. `others`: the other ranks, which do the same with
        their shares."""
        self._threads = DiskThreads(store, host)
        self._near = near
        self._others = others
        self._numbers = itertools.count(1)

    def copy(self, copies: BlockCopies) -> PendingCopy:
        blocks, slots = copies.blocks.tolist(), copies.slots.tolist()
        if copies.target == "disk":
            return self._start("write", slots, blocks, copies.names)
        if copies.source == "disk":
            return self._start("read", blocks, slots, copies.names)
        return self._near.copy(copies)

    def forget(self, mark: bytes) -> PendingCopy:
        """Erase what the disk has of the owner with this mark, after the writes that were asked for before."""
        return self._start("forget", [], [], (mark,))

    def _start(self, kind: DiskWorkKind, slots: list[int], places: list[int], names: tuple[bytes, ...]) -> PendingCopy:
        work = DiskWork(next(self._numbers), kind, slots, places, names)
        there = () if self._others is None else (self._others.start(work),)
        return _Together(self._threads.start(work), *there)

    def close(self) -> None:
        self._threads.close()


class _Together:
    """A `PendingCopy`: those of all ranks."""

    def __init__(self, *parts: PendingCopy) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> float:
        return max([part.wait() for part in self._parts])


def _serve(copies: queue.SimpleQueue[_DiskCopy | None], niceness: int) -> None:
    if niceness:
        with contextlib.suppress(OSError, AttributeError):  # On Linux a thread has a priority of its own.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (pending := copies.get()) is not None:
        pending.run()
