"""The launched steps that are not confirmed yet, oldest first, and the number of the next one."""

from __future__ import annotations

from collections import deque

from millrace.plan.step import StepPlan


class StepsInFlight:
    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()
        self.next_step = 0

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest(self) -> StepPlan | None:
        return self._plans[0] if self._plans else None

    @property
    def fence(self) -> int | None:
        """The last launched step, or None: what is released now may be reused once that step has completed."""
        return self.next_step - 1 if self._plans else None

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.next_step += 1

    def complete(self, step_no: int) -> StepPlan:
        """Remove and return the oldest step, which must have this number."""
        plan = self._plans.popleft()
        if plan.step_no != step_no:
            raise AssertionError(f"step {step_no} completed, but {plan.step_no} is the oldest in flight")
        return plan

    def skip(self, plan: StepPlan, count: int) -> None:
        """So many steps were launched, and as many completed; `plan` is the last one."""
        self.next_step += count
        if self._plans:
            self._plans.clear()
            self._plans.append(plan)

    def clear(self) -> None:
        self._plans.clear()
