"""Scheduling policies: the order of one tenant's waiting requests of one class, and which row to preempt for them.

A sort key is an arrival time in seconds, shifted by the policy's preference. A preference is therefore a bounded head
start, which later arrivals cannot beat for ever: no policy starves a request. Classes are handled by `WaitingQueue`,
tenants by `FairShares`, KV memory by `AdmissionForecast`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from millrace.config import PolicyName
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.queue.learned_lengths import LearnedLengths
from millrace.plan.request import BATCH, INTERACTIVE, Request
from millrace.plan.rows.rows import Rows
from millrace.plan.step import Int64s

SECONDS_PER_TOKEN = 0.05
"""Shortest first: head start per token that a request is expected to be shorter."""
QUANTA = (32, 128, 512, 2048)
"""Feedback: output tokens after which a request drops to the next level."""
SECONDS_PER_LEVEL = 20.0
"""Feedback: head start of a level over the next lower one."""
SECONDS_PER_CACHED_TOKEN, MAX_HEAD_START_S = 0.005, 20.0
"""Longest prefix first: head start per prompt token that is cached or being computed on arrival, and its bound."""
OBJECTIVES_S = (1.0, 10.0, 120.0)
"""Earliest deadline: time to first token due by class, for requests whose own deadline is later."""
MAX_YIELDS = 4
"""Times a row may be preempted in favour of another request."""


class Policy(Protocol):
    def sort_key(self, request: Request) -> float:
        """Order among requests of one tenant and class, in seconds; lower goes first. Fixed while waiting."""

    def learn(self, request: Request, now: float) -> None:
        """A request finished, without being aborted, after `num_output` tokens."""

    def victim_for(self, rows: Rows, request: Request) -> int | None:
        """The running row to preempt so that this waiting request can run; usually None."""


class FirstCome:
    """In order of arrival. A batch row is preempted for an interactive request that cannot be admitted."""

    def sort_key(self, request: Request) -> float:
        return request.arrival

    def learn(self, request: Request, now: float) -> None:
        pass

    def victim_for(self, rows: Rows, request: Request) -> int | None:
        if request.priority != INTERACTIVE:
            return None
        order = rows.order
        return _cheapest(rows, order[rows.priority[order] == BATCH]) if len(order) else None


class ShortestFirst(FirstCome):
    """The request with the shortest predicted output goes first."""

    def __init__(self, predictor: LearnedLengths) -> None:
        self._predictor = predictor

    def sort_key(self, request: Request) -> float:
        expected = max(1.0, self._predictor.predict(request) - request.num_output)
        return request.arrival + SECONDS_PER_TOKEN * expected

    def learn(self, request: Request, now: float) -> None:
        self._predictor.observe(request, now)


class Feedback(FirstCome):
    """Multi-level feedback: a request starts at the top level and drops as it generates; needs no prediction.

    A row is preempted, a limited number of times, for a waiting request of a higher level.
    """

    def sort_key(self, request: Request) -> float:
        return request.arrival + SECONDS_PER_LEVEL * _level(request.num_output)

    def victim_for(self, rows: Rows, request: Request) -> int | None:
        row = super().victim_for(rows, request)
        if row is not None:
            return row
        order = rows.order
        if len(order) == 0:
            return None
        levels = np.searchsorted(QUANTA, rows.known_host[order] - rows.num_prompt[order], side="right")
        lower = order[(levels > _level(request.num_output)) & (rows.priority[order] >= request.priority)]
        return _cheapest(rows, lower, max_yields=len(QUANTA))


class EarliestDeadline(FirstCome):
    """The request due first goes first: by its own deadline or its class's objective for the first token."""

    def sort_key(self, request: Request) -> float:
        due = request.arrival + OBJECTIVES_S[min(request.priority, len(OBJECTIVES_S) - 1)]
        # After the first token, only the deadline of the whole request matters.
        if request.num_output and request.deadline < math.inf:
            return request.deadline
        return min(due, request.deadline)


class LongestPrefix(FirstCome):
    """The request that finds most of its prompt in the cache goes first, before that is evicted."""

    def __init__(self, prefix: PrefixIndex) -> None:
        self._prefix = prefix

    def sort_key(self, request: Request) -> float:
        if request.head_start_s is None:
            num_cached = self._prefix.num_expected(request, ()) * self._prefix.block_size
            request.head_start_s = min(MAX_HEAD_START_S, SECONDS_PER_CACHED_TOKEN * num_cached)
        return request.arrival - request.head_start_s


def _level(num_output: int) -> int:
    return sum(num_output >= quantum for quantum in QUANTA)


def _cheapest(rows: Rows, candidates: Int64s, max_yields: int = MAX_YIELDS) -> int | None:
    """The row that is cheapest to recompute, among those that have generated a token since their admission."""
    has_gained = rows.known_host[candidates] > rows.num_known_at_admission[candidates]
    fit = candidates[has_gained & (rows.num_yields[candidates] < max_yields)]
    if len(fit) == 0:
        return None
    lost = rows.computed[fit] - rows.num_shared[fit] * rows.block_size
    return int(fit[np.argmin(lost)])


_MAKERS: dict[PolicyName, Callable[[PrefixIndex], Policy]] = {
    "fcfs": lambda _: FirstCome(),
    "shortest": lambda _: ShortestFirst(LearnedLengths()),
    "feedback": lambda _: Feedback(),
    "deadline": lambda _: EarliestDeadline(),
    "prefix": LongestPrefix,
}


def make_policy(name: PolicyName, prefix: PrefixIndex) -> Policy:
    return _MAKERS[name](prefix)
