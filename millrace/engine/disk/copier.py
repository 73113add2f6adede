"""Copies between host memory and a disk, in threads of their own: no step waits for them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from millrace.engine.copies import Copier, PendingCopy
from millrace.engine.disk.store import BlockStore
from millrace.plan.step import BlockCopies
from millrace.run.device.host_blocks import HostBlocks

NUM_READERS = 2
WRITER_NICENESS = 10
"""Writes take no core from the steps."""
CLOSE_S = 2.0
"""Longest wait for the threads at the end. The process does not wait for them either."""


class _DiskCopy:
    """A `PendingCopy`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._ended = work, threading.Event()
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

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> float:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._seconds


class DiskCopier:
    """Sends copies to and from the disk to its threads, and all others to `near`."""

    def __init__(self, store: BlockStore, host: Sequence[HostBlocks], near: Copier) -> None:
        """`host`: the host memory that `near` copies to and from."""
        self._store, self._host, self._near = store, host, near
        self._reads: queue.SimpleQueue[_DiskCopy | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_DiskCopy | None] = queue.SimpleQueue()
        parts = [(self._reads, 0)] * NUM_READERS + [(self._writes, WRITER_NICENESS)]
        self._threads = [threading.Thread(target=_serve, args=part, name="kv-disk", daemon=True) for part in parts]
        for thread in self._threads:
            thread.start()

    def copy(self, copies: BlockCopies) -> PendingCopy:
        if copies.target == "disk":
            return self._queue(self._writes, self._store.write, copies.slots.tolist(), copies.blocks.tolist(), copies)
        if copies.source == "disk":
            return self._queue(self._reads, self._store.read, copies.blocks.tolist(), copies.slots.tolist(), copies)
        return self._near.copy(copies)

    def _queue(
        self,
        threads: queue.SimpleQueue[_DiskCopy | None],
        move: Callable[[int, bytes, Sequence[memoryview]], None],
        on_disk: list[int],
        on_host: list[int],
        copies: BlockCopies,
    ) -> PendingCopy:
        def work() -> None:
            for slot, place, name in zip(on_disk, on_host, copies.names, strict=True):
                move(slot, name, [host.bytes_of(place) for host in self._host])

        pending = _DiskCopy(work)
        threads.put(pending)
        return pending

    def forget(self, mark: bytes) -> PendingCopy:
        """Erase what the disk has of the owner with this mark, after the writes that were asked for before."""
        pending = _DiskCopy(lambda: self._store.forget(mark))
        self._writes.put(pending)
        return pending

    def close(self) -> None:
        """No copy follows. A disk that hangs keeps its threads and its lock until the process ends."""
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self._writes.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()


def _serve(copies: queue.SimpleQueue[_DiskCopy | None], niceness: int) -> None:
    if niceness:
        with contextlib.suppress(OSError, AttributeError):  # On Linux a thread has a priority of its own.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    while (pending := copies.get()) is not None:
        pending.run()
