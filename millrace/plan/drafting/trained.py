"""Whether rows get drafts of a trained drafter beside those from text, and how many: as far as they pay for its time.

What is measured: how often the first, second ... draft of a row is accepted when the trained drafter proposed it, and
how long one pass of the drafter takes, by rows. What drafts add to the step itself is known to `DraftControl`.
A row whose drafts do not pay for what they add goes without, and slowly approaches the average until it is tried again.
If no row's drafts pay, the drafter rests: it learns nothing more of the rows that decode then, so steps are plain ones.
After some time it is tried again in the first steps of a new request, whose prompt it has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from millrace.plan.drafting.control import (
    FIRST_ACCEPTANCE,
    KEEPS,
    LASTING,
    LEARN,
    LOSES,
    MANY_ROWS,
    MEAN_LEARN,
    NUM_PLAIN,
    PLAIN_EVERY,
    PROBE_LEARN,
    WINS,
    Floats,
    StepCosts,
)
from millrace.plan.step import Bools, Int32s, Int64s

LENGTHS = (1, 2, 3, 5, 7)
"""Numbers of drafts that are compared: each is one more pass of the drafter."""
FIRST_LENGTH, PROBE_LENGTH = 2, 1
"""Until something is measured, and in trials."""
FIRST_REST, LAST_REST = 128, 4096
"""Steps without drafts until a new request tries again, doubled by each trial that fails: a trial costs about three
steps and a few percent of a prompt."""
NUM_TRIED = 6
"""Steps of a trial."""
LEAVES, ENTERS = 0.9, 1.1
"""A row with drafts keeps them while they give at least the first share of what they cost; one without gets them from
the second on."""
FORGET = 1 / 128
"""How much a row without drafts approaches the average with each step."""
_PLACES = np.arange(1, LENGTHS[-1] + 1)


class StepTimes(Protocol):
    def step_s(self, num_rows: int, num_tokens: float) -> float | None:
        """Predicted seconds of a decode step that computes so many tokens, without a drafter's time. None if nothing
        was measured."""


@dataclass(frozen=True, slots=True)
class TrainedDecision:
    length: int
    """Drafts of each row that has any."""
    has_drafts: Bools
    worth: float
    """Tokens per step that they give a row beyond what they cost: drafts from text must promise more."""


class TrainedControl:
    def __init__(self, capacity: int, max_drafts: int, times: StepTimes) -> None:
        self._times = times
        self._lengths = tuple(length for length in LENGTHS if length <= max_drafts)
        self.survival = np.zeros((capacity, LENGTHS[-1]))
        """By row: share of the steps with trained drafts in which the first, second ... one was accepted."""
        self.mean = FIRST_ACCEPTANCE**_PLACES
        """What a new row starts from."""
        self._request_ids = np.full(capacity, -1, np.int64)
        self._is_on = np.ones(capacity, np.bool_)
        """Rows whose drafts pay."""
        self._is_asleep = np.zeros(capacity, np.bool_)
        """Rows that decoded while the drafter rested: it lacks their tokens, so they get no more drafts."""
        self._passes = StepCosts()
        """Seconds of one pass of the drafter, by rows."""
        self._first = max(length for length in self._lengths if length <= FIRST_LENGTH)
        self._length = self._first
        """In use; 0: none."""
        self._wait, self._left = FIRST_REST, 0
        self._num_active, self._num_tried = LASTING, 0
        self._until_plain = PLAIN_EVERY
        self.num_probes = self.num_stops = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def rests(self) -> bool:
        """True while no row is tried. What rows compute meanwhile the drafter need not know, now or later."""
        return self._length == 0 and self._left > 0

    def is_idle(self, rows: Int64s) -> bool:
        """True if these rows certainly get no drafts."""
        return bool(self._is_asleep[rows].all())

    def skip(self) -> None:
        """A step passed in which it was known that nothing would be drafted."""
        if self.rests:
            self._left -= 1

    def decide(self, rows: Int64s, request_ids: Int64s) -> TrainedDecision | None:
        """For a step in which these rows decode. None: no row has trained drafts."""
        self._greet(rows, request_ids)
        if self._length == 0:
            return self._try_again(rows)
        if self.is_idle(rows):
            return None
        self._until_plain = self._until_plain - 1 if self._until_plain > -NUM_PLAIN else PLAIN_EVERY
        if self._until_plain < 0:
            return None
        self._num_active += 1
        self._choose(rows)
        if self._length == 0:
            return None
        is_on = self._is_on[rows] & ~self._is_asleep[rows]
        off = rows[~is_on]
        self.survival[off] += FORGET * (self.mean - self.survival[off])
        return TrainedDecision(self._length, is_on, self._worth(rows[is_on], len(rows)))

    def observe(self, rows: Int64s, request_ids: Int64s, drafts: Int32s, accepted: Int32s) -> None:
        """What became of trained drafts. `rows`: those that had any."""
        if not len(rows):
            return
        self._greet(rows, request_ids)
        few, many = PROBE_LEARN if self._length == 0 else LEARN
        weight = few + (many - few) * min(1.0, (len(rows) - 1) / MANY_ROWS)
        offered, survived = drafts[:, None] >= _PLACES, accepted[:, None] >= _PLACES
        survival = self.survival[rows]
        survival += np.where(offered, weight * (survived - survival), 0.0)
        # Places that were not tried are assumed to be right as often as the first one, given those before.
        for place in range(1, len(_PLACES)):
            untried = ~offered[:, place]
            survival[untried, place] = survival[untried, place - 1] * survival[untried, 0]
        self.survival[rows] = survival
        self.mean = self.mean + (MEAN_LEARN if len(rows) == 1 else weight) * (survival.mean(axis=0) - self.mean)
        if self._length == 0:
            self.judge_trial(rows)

    def observe_time(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """The drafter took this long for its passes over so many rows."""
        if num_rows and num_passes and seconds > 0:
            self._passes.observe(num_rows, seconds / num_passes)

    def _try_again(self, rows: Int64s) -> TrainedDecision | None:
        if self._left > 0:
            self._left -= 1
            self._is_asleep[rows] = True
            return None
        is_awake = ~self._is_asleep[rows]
        if not is_awake.any():
            return None
        if self._num_tried == NUM_TRIED:
            self.rest(min(2 * self._wait, LAST_REST))
            return None
        self._num_tried += 1
        self.num_probes += 1
        return TrainedDecision(PROBE_LENGTH, is_awake, 0.0)

    def judge_trial(self, rows: Int64s) -> None:
        length, rate, is_on = self._best(rows)
        plain = self._plain_rate(len(rows))
        if plain is None or rate > WINS * plain:
            self._length, self._num_active, self._is_on[rows] = length, 0, is_on

    def _choose(self, rows: Int64s) -> None:
        plain = self._plain_rate(len(rows))
        if plain is None or not self._passes.is_known:
            return
        current, is_on = self._rate(rows, self._length)
        length, rate, best_on = self._best(rows)
        if rate > KEEPS * current:
            self._length, current, is_on = length, rate, best_on
        self._is_on[rows] = is_on
        if current < LOSES * plain or not is_on.any():
            self._stop()

    def _stop(self) -> None:
        """If drafts began not long ago, a trial was wrong: the next one waits longer."""
        is_short = self._num_active < LASTING
        self.rest(min(2 * self._wait, LAST_REST) if is_short else FIRST_REST)
        self.num_stops += 1

    def rest(self, num_steps: int) -> None:
        self._length, self._wait, self._left = 0, num_steps, num_steps
        self._num_active = self._num_tried = 0

    def _greet(self, rows: Int64s, request_ids: Int64s) -> None:
        """Rows that another request has now start from the average."""
        is_new = self._request_ids[rows] != request_ids
        if is_new.any():
            new = rows[is_new]
            self._request_ids[new], self.survival[new] = request_ids[is_new], self.mean
            self._is_on[new], self._is_asleep[new] = True, False

    def _plain_rate(self, num_rows: int) -> float | None:
        """Tokens per second without drafts."""
        seconds = self._times.step_s(num_rows, num_rows)
        return None if seconds is None else num_rows / seconds

    def _best(self, rows: Int64s) -> tuple[int, float, Bools]:
        """The length with the highest expected rate, that rate, and the rows that pay."""
        if self._plain_rate(len(rows)) is None or not self._passes.is_known:
            return self._first, 0.0, np.ones(len(rows), np.bool_)
        rates = ((length, *self._rate(rows, length)) for length in self._lengths)
        return max(rates, key=lambda found: found[1])

    def _rate(self, rows: Int64s, length: int) -> tuple[float, Bools]:
        """Expected tokens per second if the rows that pay have so many drafts, and those rows."""
        num_rows, accepted = len(rows), self._accepted(rows, length)
        own = np.where(self._is_on[rows], LEAVES, ENTERS)
        pays: Bools = (accepted > own * self._marginal_cost(num_rows, length)) & ~self._is_asleep[rows]
        num_on = int(pays.sum())
        seconds = self._step_s(num_rows, num_rows + num_on * length)
        if num_on:
            seconds += length * self._passes.seconds(num_on)
        return (num_rows + float(accepted[pays].sum())) / seconds, pays

    def _accepted(self, rows: Int64s, length: int) -> Floats:
        """Expected accepted drafts of each row."""
        expected: Floats = self.survival[rows, :length].sum(axis=1)
        return expected

    def _marginal_cost(self, num_rows: int, length: int) -> float:
        """What the drafts of one more row cost, in tokens at the rate without drafts."""
        verifying = self._step_s(num_rows, num_rows * (1 + length)) - self._step_s(num_rows, num_rows)
        drafting = self._passes.seconds(num_rows) - (self._passes.seconds(1) if num_rows > 1 else 0.0)
        more_s = verifying / num_rows + length * drafting / max(1, num_rows - 1)
        return more_s * num_rows / self._step_s(num_rows, num_rows)

    def _worth(self, rows: Int64s, num_rows: int) -> float:
        if not len(rows) or not self._passes.is_known or self._plain_rate(num_rows) is None:
            return 0.0
        cost = self._marginal_cost(num_rows, self._length)
        return max(0.0, float(self._accepted(rows, self._length).mean()) - cost)

    def _step_s(self, num_rows: int, num_tokens: float) -> float:
        seconds = self._times.step_s(num_rows, num_tokens)
        assert seconds is not None, "steps were measured"
        return seconds
