"""Notices a step that never ends: logs the plan it was given and every thread's stack, once per stall.

The front notices by itself that no step completes, and turns `/ready` false; this is for whoever must find out why.
A step that has not ended after `HANG_S` never will: the engine's process is then given up, and another takes its place.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

from millrace.plan.step import StepPlan

log = logging.getLogger(__name__)

STALL_S = 30.0
HANG_S = 300.0
CHECK_EVERY_S = 5.0

Oldest = Callable[[], tuple[StepPlan, float] | None]
"""The oldest step in flight and when it was launched."""


class Watchdog:
    def __init__(
        self,
        oldest: Oldest,
        *,
        stall_s: float = STALL_S,
        check_every_s: float = CHECK_EVERY_S,
        hang_s: float = HANG_S,
        on_hang: Callable[[], None] | None = None,
    ) -> None:
        self._oldest = oldest
        self._stall_s = stall_s
        self._hang_s, self._on_hang = hang_s, on_hang
        self._check_every_s = check_every_s
        self._stopped = threading.Event()
        self._told_of = -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Joined, so that this thread never holds the last reference to an engine: a thread that frees tensors while
        the interpreter ends aborts the process."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._check_every_s):
            found = self._oldest()
            if found is not None:
                self._check(*found)

    def _check(self, plan: StepPlan, launched_at: float) -> None:
        running_s = time.monotonic() - launched_at
        if running_s >= self._hang_s and self._on_hang is not None:
            log.error("step %d has not ended after %.0f s; the engine gives up", plan.step_no, running_s)
            self._on_hang()
        if running_s < self._stall_s or plan.step_no == self._told_of:
            return
        self._told_of = plan.step_no
        log.error("step %d has not ended after %.0f s: %s", plan.step_no, running_s, describe(plan))
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


def describe(plan: StepPlan) -> str:
    """The plan's size and edges in a line; no token ids, which are somebody's text."""
    return (
        f"{len(plan.rows)} rows, {plan.num_tokens} tokens, {int(plan.samples.sum())} sampling,"
        f" longest chunk {int(plan.counts.max())}, longest sequence {int((plan.starts + plan.counts).max())},"
        f" {len(plan.admitted)} admitted, {len(plan.released)} released, {len(plan.block_ids)} new blocks"
    )
