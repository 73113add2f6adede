"""Copies of KV blocks between locations: started after each plan, acknowledged when they are done."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from millrace.plan.planner.protocol import Planner
from millrace.plan.step import BlockCopies, Location

log = logging.getLogger(__name__)

MAX_WAIT_S, POLL_S = 0.05, 0.0002
"""Longest wait for copies: they may be stuck, and messages must be taken meanwhile."""
MAX_POLLS = round(MAX_WAIT_S / POLL_S)
"""Ends the wait also where the given clock stands still, as a simulated one may."""


LOOK_AGAIN_S, SOON_S = 0.002, 1.0
"""While nothing else is to be done, copies younger than this are looked for so often."""
Route = tuple[Location, Location]
"""Source and target."""


class PendingCopy(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> float:
        """Seconds that the copies took, without waiting for their turn."""


class Copier(Protocol):
    """What executes copies: a runner."""

    def copy(self, copies: BlockCopies) -> PendingCopy:
        """Start the copies beside the steps, after those launched so far."""


class _Started(NamedTuple):
    copies: BlockCopies
    pending: PendingCopy
    at: float


class BlockCopying:
    def __init__(
        self, scheduler: Planner, copier: Copier, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        """`sleep` passes seconds of `clock`."""
        self._scheduler = scheduler
        self._copier = copier
        self._clock = clock
        self._sleep = sleep
        self._started: dict[Route, deque[_Started]] = {}
        """In the order of their start: those of one route end in it, and no route holds up another."""

    def __len__(self) -> int:
        """Copies that are not acknowledged yet."""
        return sum(map(len, self._started.values()))

    @property
    def has_near(self) -> bool:
        """True if copies to or from the device are not acknowledged yet: they end within a few steps."""
        return self._oldest_near() is not None

    def _oldest_near(self) -> _Started | None:
        near = (lane[0] for route, lane in self._started.items() if "device" in route and lane)
        return min(near, key=lambda started: started.at, default=None)

    @property
    def look_again_s(self) -> float | None:
        """When to look for those that have ended; None if there are none. Copies that take long are looked for less
        often: they may never end."""
        began = min((lane[0].at for lane in self._started.values() if lane), default=None)
        if began is None:
            return None
        return LOOK_AGAIN_S if self._clock() - began < SOON_S else MAX_WAIT_S

    def start(self) -> None:
        """Start the copies that the scheduler wants. One that cannot be started counts as failed."""
        for copies in self._scheduler.take_copies():
            try:
                started = _Started(copies, self._copier.copy(copies), self._clock())
                self._started.setdefault((copies.source, copies.target), deque()).append(started)
            except Exception:
                log.exception("KV blocks could not be copied; their tokens will be computed again")
                self._scheduler.copies_done(copies, failed=True)

    def acknowledge(self, *, wait: bool = False) -> None:
        """Acknowledge the copies that are done; with `wait`, wait for one to or from the device for a while."""
        until, oldest = self._clock() + MAX_WAIT_S, self._oldest_near()
        for _ in range(MAX_POLLS if wait and oldest is not None else 0):
            if oldest is None or oldest.pending.done() or self._clock() >= until:
                break
            self._sleep(POLL_S)
        # Copies from the device first: blocks that arrive are then the last to be evicted before a request takes them.
        for lane in sorted(self._started.values(), key=lambda lane: bool(lane) and lane[0].copies.source != "device"):
            while lane and lane[0].pending.done():
                self._end(lane.popleft())

    def settle(self, wait_s: float) -> None:
        """No step will run any more: until then, move blocks to where they outlive the process."""
        until = self._clock() + wait_s
        for _ in range(round(wait_s / POLL_S)):
            self._scheduler.settle(self._clock())
            self.start()
            if not len(self) or self._clock() >= until:
                return
            self._sleep(POLL_S)
            self.acknowledge()

    def _end(self, started: _Started) -> None:
        failed, seconds = False, 0.0
        try:
            seconds = started.pending.wait()
        except OSError as error:
            log.warning("a copy of KV blocks failed, and their tokens will be computed again: %s", error)
            failed = True
        except Exception:
            log.exception("a copy of KV blocks failed; their tokens will be computed again")
            failed = True
        self._scheduler.copies_done(started.copies, failed, seconds)
