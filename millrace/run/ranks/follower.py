"""Runs the steps that rank 0 recorded, on another runner and in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from millrace.plan.step import BlockCopies, CapturePlan, StepInputs, StepPlan
from millrace.run.device.device import Pending
from millrace.run.protocol import AnyRunner, StepResult
from millrace.run.ranks.recorder import DiskWork, LoggedResult, Record, RunnerSetup, SlotFill, SlotPiece, vectors_of

VECTOR_TOLERANCE = 1e-4
"""Largest difference of an element of a vector: they are normalised."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A step as this rank ran it, beside what rank 0 says of it."""

    plan: StepPlan
    found: StepResult | Exception
    expected: LoggedResult
    request_ids: tuple[int, ...]
    """Of the drawing rows."""

    def difference(self) -> str | None:
        """A sentence that names the first difference; None if there is none."""
        step_no = self.plan.step_no
        if isinstance(self.found, Exception):
            return f"Step {step_no} failed on the mirror and not on rank 0: {self.found!r}"
        expected, found = np.frombuffer(self.expected.tokens, np.int32), self.found.drawn()
        if not np.array_equal(expected, found):
            num_common = min(len(expected), len(found))
            at = next((at for at in range(num_common) if expected[at] != found[at]), num_common)
            index = self._drawing_row(at)
            tokens = [str(own[at]) if at < len(own) else "no token" for own in (expected, found)]
            return (
                f"The draws differ in step {step_no}, row {int(self.plan.rows[self.plan.samples][index])} (request"
                f" {self.request_ids[index]}): rank 0 drew {tokens[0]}, the mirror drew {tokens[1]}."
            )
        logged, vectors = np.frombuffer(self.expected.vectors, np.float32), vectors_of(self.found)
        if len(logged) != len(vectors):
            return f"Step {step_no} gave {len(logged)} numbers of vectors on rank 0 and {len(vectors)} on the mirror."
        error = float(np.abs(logged - vectors).max(initial=0.0))
        if error > VECTOR_TOLERANCE:
            return f"The vectors differ in step {step_no}: by {error:.2g} between rank 0 and the mirror."
        return None

    def _drawing_row(self, at: int) -> int:
        """The index, among the drawing rows, of the row that drew token `at`."""
        counts = None if isinstance(self.found, Exception) else self.found.counts
        if counts is None:
            return at
        return min(int(np.searchsorted(np.cumsum(counts), at, side="right")), len(counts) - 1)


class Follower:
    def __init__(self, runner: AnyRunner, fill: Callable[[SlotFill], None] | None = None) -> None:
        """`fill`: how slots of adapters are filled; None if steps have none."""
        self._runner = runner
        self._fill = fill
        self._waiting: deque[StepPlan | BlockCopies | CapturePlan | SlotFill] = deque()
        """Not begun yet: a step waits for its inputs, and everything behind it for the step."""
        self._inputs: dict[int, StepInputs] = {}
        self._begun: dict[int, tuple[StepPlan, Pending[StepResult] | Exception]] = {}
        self._request_ids: dict[int, int] = {}
        """By table row."""

    def take(self, record: Record) -> Followed | None:
        """The next record of rank 0. After the result of a step: the step."""
        if isinstance(record, LoggedResult):
            return self._finish(record)
        if isinstance(record, StepInputs):
            self._inputs[record.step_no] = record
        elif not isinstance(record, RunnerSetup | SlotPiece | DiskWork):
            self._waiting.append(record)
        self._begin_ready()
        return None

    def _begin_ready(self, due: int = -1) -> None:
        """Begin what waits, up to a step without its inputs. `due`: a step that rank 0 has completed."""
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, StepPlan) and first.step_no > due and not self._is_ready(first):
                return
            self._waiting.popleft()
            if isinstance(first, CapturePlan):
                self._runner.capture(first)
            elif isinstance(first, BlockCopies):
                self._copy(first)
            elif isinstance(first, SlotFill):
                assert self._fill is not None
                self._fill(first)
            elif first.step_no >= due:  # Rank 0 failed at the others, and announces every row again.
                self._begun[first.step_no] = first, self._begin(first)

    def _copy(self, copies: BlockCopies) -> None:
        """Copies run beside the steps, and rank 0 says what they may overlap by when it sends them. Here steps may be
        behind: the copies follow those before them, and those behind them wait."""
        for _, pending in self._begun.values():
            if not isinstance(pending, Exception):
                with suppress(Exception):  # Its own result says so.
                    pending.wait()
        self._runner.copy(copies).wait()

    def _is_ready(self, plan: StepPlan) -> bool:
        return plan.step_no in self._inputs or (plan.masked is None and plan.draft_places is None)

    def _begin(self, plan: StepPlan) -> Pending[StepResult] | Exception:
        inputs = self._inputs.get(plan.step_no)
        try:
            self._runner.forward(plan, () if inputs is None else inputs.drafts)
            return self._runner.draw(plan, None if inputs is None or inputs.masks is None else inputs)
        except Exception as error:
            return error

    def _finish(self, result: LoggedResult) -> Followed:
        step_no = result.step_no
        self._begin_ready(step_no)
        plan, pending = self._begun[step_no]
        for admission in plan.admitted:
            self._request_ids[admission.row] = admission.request_id
        ids = tuple(self._request_ids.get(row, -1) for row in plan.rows[plan.samples].tolist())
        self._begun = {own: begun for own, begun in self._begun.items() if own > step_no}
        self._inputs = {own: inputs for own, inputs in self._inputs.items() if own > step_no}
        if isinstance(pending, Exception):
            return Followed(plan, pending, result, ids)
        try:
            return Followed(plan, pending.wait(), result, ids)
        except Exception as error:
            return Followed(plan, error, result, ids)
