"""How fast the engine gets through its work, measured as it goes: what forecasts of waiting rest on."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
DECAY = 0.05
FULL_STEP_TOKENS = 256
"""Steps of fewer tokens say little about how fast many would be computed."""


RUSH_S = 2.0
"""How long a rush must have lasted to be believed."""
Mark = tuple[float, int, tuple[int, ...]]
"""When, and until then how many were seated, and how many of each class had come."""


class MeasuredRates:
    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()
        self._num_arrived = [0, 0, 0]
        self._num_seated = 0
        self._mean_stay_s = 0.0
        self.tokens_per_s = 0.0
        """In full steps; 0 until there were any."""

    def on_step(self, num_tokens: int, step_s: float) -> None:
        if num_tokens >= FULL_STEP_TOKENS and step_s > 0:
            weight = DECAY if self.tokens_per_s else 1.0
            self.tokens_per_s += weight * (num_tokens / step_s - self.tokens_per_s)

    def on_admitted(self, count: int) -> None:
        self._num_seated += count

    def on_arrival(self, priority: int) -> None:
        self._num_arrived[priority] += 1

    def on_ended(self, stay_s: float) -> None:
        """A request that had a row has given it up after so long."""
        weight = DECAY if self._mean_stay_s else 1.0
        self._mean_stay_s += weight * (stay_s - self._mean_stay_s)

    def mark(self, now: float) -> None:
        """Called a few times a second; the rate is measured from the oldest mark in the window to the newest."""
        self._marks.append((now, self._num_seated, tuple(self._num_arrived)))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()

    def admissions_per_s(self, num_rows: int) -> float:
        """What was measured, or what follows from how long requests stay in `num_rows` rows: as long as nobody waits,
        what was measured is how many came, not how many could have."""
        follows = num_rows / self._mean_stay_s if self._mean_stay_s else 0.0
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return follows
        (began, before, _), (now, seated, _) = self._marks[0], self._marks[-1]
        return max(follows, (seated - before) / (now - began))

    def arrivals_per_s(self) -> tuple[float, ...]:
        """By class: over the window, or over its last moments where those saw more. A rush is believed as soon as it
        begins, because whoever is promised something in it meets all the rest of it."""
        if len(self._marks) < 2:
            return (0.0, 0.0, 0.0)
        newest = self._marks[-1]
        recent = next((mark for mark in reversed(self._marks) if newest[0] - mark[0] >= RUSH_S), self._marks[0])
        return tuple(map(max, _rates(self._marks[0], newest), _rates(recent, newest)))


def _rates(before: Mark, after: Mark) -> tuple[float, ...]:
    elapsed_s = after[0] - before[0]
    if elapsed_s <= 0:
        return (0.0, 0.0, 0.0)
    return tuple((now - then) / elapsed_s for now, then in zip(after[2], before[2], strict=True))
