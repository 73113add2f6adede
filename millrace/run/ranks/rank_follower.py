"""Another rank of a model that is split: runs the steps that rank 0 recorded, at the same time as rank 0.

Sums over the ranks wait for every rank, so a step begins as soon as it can: at its plan, or, if it has draft places, at
the drafts of rank 0. Its draw begins at its masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from millrace.plan.step import BlockCopies, CapturePlan, StepInputs, StepPlan
from millrace.run.device.device import Pending
from millrace.run.protocol import AnyRunner, StepResult
from millrace.run.ranks.recorder import (
    DiskWork,
    LoggedResult,
    Record,
    RunnerSetup,
    SlotFill,
    SlotPiece,
    capture,
    vectors_of,
)

TakeWork = Callable[[DiskWork, Sequence[Pending[float]]], None]


class RankFollower:
    def __init__(
        self,
        runner: AnyRunner,
        take_piece: Callable[[SlotPiece], None] | None = None,
        take_work: TakeWork | None = None,
        *,
        proposes: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`take_piece`: of the matrices of adapters; None if steps have none. `take_work`: of a disk, after the copies
        that are given with it; None if there is none. `proposes`: the runner drafts what rank 0 drafts. `check`: raises
        if what a step gave may be wrong."""
        self._runner = runner
        self._take_piece = take_piece
        self._take_work = take_work
        self._proposes = proposes
        self._check = check
        self._waiting: deque[StepPlan | BlockCopies | CapturePlan | SlotPiece | DiskWork] = deque()
        """Not begun yet."""
        self._copies: list[Pending[float]] = []
        """Begun, and not known to have ended."""
        self._inputs: dict[int, deque[StepInputs]] = {}
        """By step, in the order of rank 0: drafts, then masks."""
        self._undrawn: StepPlan | None = None
        """Its forward pass is queued; it waits for its masks."""
        self._begun: dict[int, Pending[StepResult]] = {}

    def take(self, record: Record) -> str | None:
        """The next record of rank 0. After the result of a step: a sentence that says how it differs from this rank's,
        or empty."""
        if isinstance(record, LoggedResult):
            return self._compare(record)
        if isinstance(record, StepInputs):
            self._inputs.setdefault(record.step_no, deque()).append(record)
        elif not isinstance(record, RunnerSetup | SlotFill):
            self._waiting.append(record)
        while self._go_on():
            pass
        return None

    def _go_on(self) -> bool:
        """Begin the next thing that can begin. False if there is none."""
        if self._undrawn is not None and self._draw(self._undrawn):
            return True
        if not self._waiting:
            return False
        first = self._waiting[0]
        if isinstance(first, SlotPiece):
            assert self._take_piece is not None
            self._take_piece(first)
        elif isinstance(first, BlockCopies):
            self._undrawn = None  # They follow the masks of the step before: rank 0 has given up one without.
            self._copies = [copy for copy in self._copies if not copy.done()]
            self._copies.append(self._runner.copy(first))
        elif isinstance(first, DiskWork):
            assert self._take_work is not None
            self._take_work(first, tuple(self._copies))
        elif isinstance(first, CapturePlan):
            capture(self._runner, first)
        else:
            drafts, is_told = self._inputs.get(first.step_no), first.draft_places is not None and not self._proposes
            if is_told and not drafts:
                return False
            self._undrawn = None  # Rank 0 has given up a step that it never drew.
            given = drafts.popleft().drafts if is_told and drafts else ()
            self._runner.forward(first, given)
            if first.masked is None:
                self._begun[first.step_no] = self._runner.draw(first)
            else:
                self._undrawn = first
        self._waiting.popleft()
        return True

    def _draw(self, plan: StepPlan) -> bool:
        inputs = self._inputs.get(plan.step_no)
        if not inputs:
            return False
        masks = inputs.popleft()
        self._begun[plan.step_no] = self._runner.draw(plan, None if masks.masks is None else masks)
        self._undrawn = None
        return True

    def _compare(self, result: LoggedResult) -> str:
        """Steps that failed have no result. They are forgotten with the next one that has."""
        step_no = result.step_no
        found = self._begun[step_no].wait()
        self._check()
        self._begun = {own: begun for own, begun in self._begun.items() if own > step_no}
        self._inputs = {own: inputs for own, inputs in self._inputs.items() if own > step_no}
        if not np.array_equal(np.frombuffer(result.tokens, np.int32), found.drawn()):
            return f"The draws of step {step_no} differ"
        if not np.array_equal(np.frombuffer(result.vectors, np.float32), vectors_of(found)):
            return f"The vectors of step {step_no} differ"
        return ""
