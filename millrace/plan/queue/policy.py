"""Scheduling policies: who goes first among one tenant's waiting requests of one class, and who gives way.

A policy answers with a place in seconds, as if on the clock of arrivals. What it prefers is a head start of so many
seconds, so every preference is bounded: an arrival later than the head start no longer passes. That is why no policy
starves anybody. Classes (`WaitingQueue`), tenants (`FairShares`) and KV memory (`AdmissionForecast`) are not a policy's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from millrace.config import PolicyName
from millrace.plan.queue.predict import OutputLengthPredictor
from millrace.plan.request import BATCH, INTERACTIVE, Request
from millrace.plan.rows import Rows
from millrace.plan.step import Int64s

SECONDS_PER_TOKEN = 0.05
"""Shortest first: each token that a request is expected to be shorter lets it pass arrivals this much earlier."""
QUANTA = (32, 128, 512, 2048)
"""Feedback: generated tokens after which a request sinks to the next level."""
SECONDS_PER_LEVEL = 20.0
OBJECTIVES_S = (1.0, 10.0, 120.0)
"""Earliest deadline: until when the first token is due, by class, for a request whose own deadline is later."""
MOST_YIELDS = 4
"""A row that has been preempted this often no longer gives way."""


class Policy(Protocol):
    def place(self, request: Request) -> float:
        """Where the request stands among its tenant's of its class: seconds, smaller first; fixed while waiting."""

    def learn(self, request: Request) -> None:
        """A request ended by itself after `num_output` tokens."""

    def giving_way(self, rows: Rows, request: Request) -> int | None:
        """A running row that should go back to the queue, so that this waiting request can run. Usually none."""


class FirstCome:
    """In order of arrival. A batch row gives way to an interactive request that finds no room."""

    def place(self, request: Request) -> float:
        return request.arrival

    def learn(self, request: Request) -> None:
        pass

    def giving_way(self, rows: Rows, request: Request) -> int | None:
        if request.priority != INTERACTIVE:
            return None
        order = rows.order
        return _cheapest(rows, order[rows.priority[order] == BATCH]) if len(order) else None


class ShortestFirst(FirstCome):
    """The request that is expected to need least goes first, by an online prediction of its output length."""

    def __init__(self, predictor: OutputLengthPredictor) -> None:
        self._predictor = predictor

    def place(self, request: Request) -> float:
        expected = max(1.0, self._predictor.predict(request) - request.num_output)
        return request.arrival + SECONDS_PER_TOKEN * expected

    def learn(self, request: Request) -> None:
        self._predictor.observe(request)


class Feedback(FirstCome):
    """Multi-level feedback: everybody starts on top and sinks with what it has generated; no prediction is needed.

    A row that has sunk gives way to a waiting request of a higher level, a bounded number of times.
    """

    def place(self, request: Request) -> float:
        return request.arrival + SECONDS_PER_LEVEL * _level(request.num_output)

    def giving_way(self, rows: Rows, request: Request) -> int | None:
        row = super().giving_way(rows, request)
        if row is not None:
            return row
        order = rows.order
        if len(order) == 0:
            return None
        levels = np.searchsorted(QUANTA, rows.known_host[order] - rows.num_prompt[order], side="right")
        sunk = order[(levels > _level(request.num_output)) & (rows.priority[order] >= request.priority)]
        return _cheapest(rows, sunk, most_yields=len(QUANTA))


class EarliestDeadline(FirstCome):
    """The one that is due first goes first: its own deadline, or its class's objective for the first token."""

    def place(self, request: Request) -> float:
        due = request.arrival + OBJECTIVES_S[min(request.priority, len(OBJECTIVES_S) - 1)]
        # Once something has been generated only the whole request's deadline is left to meet.
        if request.num_output and request.deadline < math.inf:
            return request.deadline
        return min(due, request.deadline)


def _level(num_output: int) -> int:
    return sum(num_output >= quantum for quantum in QUANTA)


def _cheapest(rows: Rows, candidates: Int64s, most_yields: int = MOST_YIELDS) -> int | None:
    """Of these rows the one with least to compute again; never one that has gained nothing since it was seated."""
    has_gained = rows.known_host[candidates] > rows.num_known_at_admission[candidates]
    fit = candidates[has_gained & (rows.num_yields[candidates] < most_yields)]
    if len(fit) == 0:
        return None
    lost = rows.computed[fit] - rows.num_shared[fit] * rows.block_size
    return int(fit[np.argmin(lost)])


_MAKERS: dict[PolicyName, Callable[[], Policy]] = {
    "fcfs": FirstCome,
    "shortest": lambda: ShortestFirst(OutputLengthPredictor()),
    "feedback": Feedback,
    "deadline": EarliestDeadline,
}


def make_policy(name: PolicyName) -> Policy:
    return _MAKERS[name]()
