"""Detects a step that does not complete: logs its plan and the stacks of all threads, once per stall.

Fronts detect the stall themselves and turn `/ready` false; these logs show its cause. A step that has not completed
after `HANG_S` is taken to hang for ever: the engine process exits and is replaced.
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

OldestStep = Callable[[], tuple[StepPlan, float] | None]
"""Returns the oldest step in flight and when it was launched."""


class Watchdog:
    def __init__(
        self,
        oldest: OldestStep,
        *,
        stall_s: float = STALL_S,
        check_every_s: float = CHECK_EVERY_S,
        hang_s: float = HANG_S,
        on_hang: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._oldest = oldest
        self._stall_s = stall_s
        self._hang_s = hang_s
        self._on_hang = on_hang
        self._check_every_s = check_every_s
        self._clock = clock
        self._stopped = threading.Event()
        self._last_logged = -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop and join the thread. Otherwise it could hold the last reference to the engine and free tensors while the
        interpreter shuts down, which aborts the process."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._check_every_s):
            found = self._oldest()
            if found is not None:
                self._check(*found)

    def _check(self, plan: StepPlan, launched_at: float) -> None:
        running_s = self._clock() - launched_at
        if running_s >= self._hang_s and self._on_hang is not None:
            log.error("step %d has not completed after %.0f s; the engine exits", plan.step_no, running_s)
            self._on_hang()
        if running_s < self._stall_s or plan.step_no == self._last_logged:
            return
        self._last_logged = plan.step_no
        log.error("step %d has not completed after %.0f s: %s", plan.step_no, running_s, describe(plan))
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


def describe(plan: StepPlan) -> str:
    """The plan's size in one line, without token ids: those would reveal the text of requests."""
    return (
        f"{len(plan.rows)} rows, {plan.num_tokens} tokens, {int(plan.samples.sum())} sampling,"
        f" longest chunk {int(plan.counts.max())}, longest sequence {int((plan.starts + plan.counts).max())},"
        f" {len(plan.admitted)} admitted, {len(plan.released)} released, {len(plan.block_ids)} new blocks"
    )
