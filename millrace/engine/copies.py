"""Copies of KV blocks between the device and host memory: started after each plan, acknowledged when they are done."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from millrace.plan.planner.protocol import Planner
from millrace.plan.step import BlockCopies

log = logging.getLogger(__name__)

MAX_WAIT_S, POLL_S = 0.05, 0.0002
"""Longest wait for copies: they may be stuck, and messages must be taken meanwhile."""
MAX_POLLS = round(MAX_WAIT_S / POLL_S)
"""Ends the wait also where the given clock stands still, as a simulated one may."""


class PendingCopy(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> float:
        """Seconds that the copies took, without waiting for their turn."""


class Copier(Protocol):
    """What executes copies: a runner."""

    def copy(self, copies: BlockCopies) -> PendingCopy:
        """Start the copies beside the steps, after those launched so far."""


class BlockCopying:
    def __init__(
        self, scheduler: Planner, copier: Copier, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        """`sleep` passes seconds of `clock`."""
        self._scheduler, self._copier, self._clock, self._sleep = scheduler, copier, clock, sleep
        self._started: deque[tuple[BlockCopies, PendingCopy]] = deque()

    def __len__(self) -> int:
        """Copies that are not acknowledged yet."""
        return len(self._started)

    def start(self) -> None:
        """Start the copies that the scheduler wants. One that cannot be started counts as failed."""
        for copies in self._scheduler.take_copies():
            try:
                self._started.append((copies, self._copier.copy(copies)))
            except Exception:
                log.exception("KV blocks could not be copied; their tokens will be computed again")
                self._scheduler.copies_done(copies, failed=True)

    def acknowledge(self, *, wait: bool = False) -> None:
        """Acknowledge the copies that are done; with `wait`, wait for the oldest for a while."""
        until = self._clock() + MAX_WAIT_S
        for _ in range(MAX_POLLS if wait and self._started else 0):
            if self._started[0][1].done() or self._clock() >= until:
                break
            self._sleep(POLL_S)
        while self._started and self._started[0][1].done():
            copies, pending = self._started.popleft()
            failed, seconds = False, 0.0
            try:
                seconds = pending.wait()
            except Exception:
                log.exception("a copy of KV blocks failed; their tokens will be computed again")
                failed = True
            self._scheduler.copies_done(copies, failed, seconds)
