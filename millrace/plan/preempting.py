"""Takes rows back: for a more urgent request, or when KV blocks run out. A preempted request waits again."""

from __future__ import annotations

import numpy as np

from millrace.plan.admitting import Admitting
from millrace.plan.confirming import Confirming
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.request import Request
from millrace.plan.rows.rows import Rows
from millrace.plan.seating import Seating
from millrace.plan.step import ReleaseReason

MAX_PREEMPTION_NOTES = 8
"""Preemptions of one request that are kept for `/explain`."""


class Preempting:
    def __init__(self, seating: Seating, waiting: WaitingQueue, admitting: Admitting, confirming: Confirming) -> None:
        self._seating, self._waiting = seating, waiting
        self._admitting, self._confirming = admitting, confirming
        self.num_preemptions = 0
        self.num_yields = 0
        """Preemptions in favour of a more urgent request."""

    def preempt_chosen(self, now: float) -> None:
        """Preempt the row that the policy names for a request that waits, if there is one."""
        victim = self._admitting.take_victim(now)
        if victim is not None:
            row, why = victim
            self._seating.rows.request(row).yields += 1
            self.num_yields += 1
            self.preempt(row, why)

    def preempt_one(self) -> bool:
        """Preempt the row that is cheapest to recompute. False if there is none: the first row always stays."""
        victim = _cheapest(self._seating.rows)
        if victim is None:
            return False
        self.preempt(victim, "KV blocks ran out and it was the cheapest to recompute")
        return True

    def preempt(self, row: int, why: str) -> None:
        request = self.release(row, "preempted")
        request.preemptions += 1
        self.num_preemptions += 1
        if len(request.diagnostics.preempted_for) < MAX_PREEMPTION_NOTES:
            request.diagnostics.preempted_for.append(f"after {request.num_output} tokens: {why}")
        self._waiting.add(request)

    def release(self, row: int, reason: ReleaseReason) -> Request:
        self._confirming.forget()
        return self._seating.release(row, reason)


def _cheapest(rows: Rows) -> int | None:
    """The row to preempt, or None. The first row in order always stays, so one request always makes progress.

    The cost is the number of tokens to recompute (not counting those found in the prefix cache), multiplied by one
    plus the number of earlier preemptions. Among equals, the last row in order is chosen.
    """
    candidates = rows.order[1:]
    if len(candidates) == 0:
        return None
    lost = rows.computed[candidates] - rows.num_shared[candidates] * rows.block_size
    preemptions = np.asarray([rows.request(row).preemptions for row in candidates.tolist()])
    cost = (lost + 1) * (1 + preemptions)
    return int(candidates[len(cost) - 1 - int(np.argmin(cost[::-1]))])
