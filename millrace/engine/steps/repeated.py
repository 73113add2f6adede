"""Many turns of the cycle at once, while the same rows decode: for a runner whose steps need no computing, because they
are priced. The result is that of one turn after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.device.device import Pending
from millrace.run.protocol import StepResult

MAX_DEPTH = 2
"""Steps in flight that turns at once know."""
_NONE = np.zeros(0, np.int64)
OnTurn = Callable[[float, float], bool]
"""Told of a turn: when its step was launched, and when the oldest was confirmed. False: the turn was the last."""


class RepeatingRunner(Protocol):
    def repeat(
        self, last: StepPlan, most: int, in_flight: Pending[StepResult] | None, on_turn: OnTurn
    ) -> tuple[Int32s, Pending[StepResult] | None] | None:
        """Launches up to `most` steps that repeat `last`, and confirms as many, `in_flight` first. Tokens of the
        confirmed ones [steps, rows], and the step in flight then. None if a row might draw an end token."""


@dataclass(slots=True)
class RepeatedTurns:
    """Steps that were confirmed, one after the other: each gave one token to every request."""

    launched_at: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    request_ids: Int64s = field(default_factory=lambda: _NONE)

    def __len__(self) -> int:
        return len(self.ended_at)


class TurnClock:
    """Notes turns, and says when the next one is no repetition: it is too late, or another number of steps would be in
    flight."""

    def __init__(self, first: float | None, confirmed_at: float, until: float, slow_s: float, depth: int) -> None:
        """`first`: when the step in flight was launched."""
        self.turns = RepeatedTurns(launched_at=[first] if first is not None else [])
        self.confirmed_at = confirmed_at
        self._until = until
        self._slow_s = slow_s
        self._is_single = depth == 1

    def on_turn(self, launched_at: float, now: float) -> bool:
        turns, began = self.turns, self.confirmed_at
        launches, ends = turns.launched_at, turns.ended_at
        launches.append(launched_at)
        launched = launches[len(ends)]
        device_s = now - (launched if launched > began else began)
        self.confirmed_at = now
        ends.append(now)
        turns.device_s.append(device_s)
        return now < self._until and (device_s >= self._slow_s) == self._is_single
