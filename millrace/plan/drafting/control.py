"""How many drafts a step should verify: as many as give the most tokens per second, by what was measured.

Two things are measured. How often a row's first, second ... draft is accepted, decayed. And how long a decode step
takes, by the tokens that it computes. Where drafts lose, steps have none; seldom, one step tries again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.plan.step import Int32s, Int64s

Floats = npt.NDArray[np.float64]

LENGTHS = (1, 3, 7, 15)
"""Numbers of drafts that are compared. Up to 7: with the row's own token, the places that graphs exist for
(`shapes/table.py`)."""
MAX_DRAFTS = 15
LEARN, PROBE_LEARN = (1 / 32, 1 / 8), (1 / 8, 1 / 2)
"""Weight of a step in the acceptance of a row, with few rows and with many, whose average is less noisy; the second
pair for the rare steps that probe."""
MANY_ROWS = 32
MEAN_LEARN = 1 / 32
"""Weight of a step in what new rows start from."""
TIME_WEIGHT = 1 / 12
"""Weight of a step in the measured times."""
LOSES, WINS = 0.98, 1.05
"""Drafts end when they give less than the first share of the tokens per second without, and begin again from the
second on."""
MIN_ACCEPTED = 0.05
"""Where every row is computed with all places: drafts of a row accepted per step, below which drafts lose whatever the
measured times say. What they cost between steps is not in those times."""
KEEPS = 1.03
"""Another number of drafts must be better by this much than the one in use."""
FIRST_PROBE, LAST_PROBE, LAST_CHEAP_PROBE = 16, 256, 32
"""Steps without drafts until the next probe. Doubled by each probe that fails, up to the second number, or to the third
where places without a draft cost nothing."""
NUM_PROBES = 3
"""Steps of one probe."""
PLAIN_EVERY, NUM_PLAIN = 256, 3
"""Steps with drafts after which a few go without, to measure those. The first ones still know of drafts in flight."""
LASTING = 128
"""Steps with drafts after which those have proved to pay."""
NEAR = 1.3
"""Sizes within this factor count as measured."""
FIRST_ACCEPTANCE = 0.5
"""Assumed until drafts were verified."""
FLOOR_STEPS = 8
"""Steps that share one least probability: to compute it takes longer than to use it."""
FREE_SHARE = 0.1
"""Cost of a further token, as a share of the average token's, beyond the longest step measured."""
MAX_MIN_PROBABILITY = 0.9
FORGET_EVERY = 128
"""Measured steps after which sizes that none of them had are forgotten: they may have been measured while the machine
was disturbed, and a size that seems slow is not used, so it would never be measured again."""


class StepCosts:
    """Measured time of decode steps by the number of tokens that they compute. Times between are interpolated."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float]] = {}
        """By class of sizes: tokens and seconds, decayed averages."""
        self._curve: tuple[Floats, Floats] | None = None
        """Sizes and times, in order; None if something was measured since."""
        self._recent: set[int] = set()
        """Classes measured since `forget_old`."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        at = num_tokens if num_tokens <= 16 else 16 + int(8 * math.log2(num_tokens / 16))
        size, before = self._seconds.get(at, (float(num_tokens), seconds))
        # One disturbed step must not decide.
        taken = min(max(seconds, before / 2), before * 2)
        self._seconds[at] = size + TIME_WEIGHT * (num_tokens - size), before + TIME_WEIGHT * (taken - before)
        self._recent.add(at)
        self._curve = None

    def forget_old(self) -> None:
        """Forget sizes that were not measured since the last call."""
        self._seconds = {at: self._seconds[at] for at in self._recent}
        self._recent.clear()
        self._curve = None

    def _known(self) -> tuple[Floats, Floats]:
        if self._curve is None:
            known = sorted(self._seconds.values())
            # A longer step is never faster: what says so is noise.
            times: Floats = np.maximum.accumulate([one for _, one in known])
            self._curve = np.array([one for one, _ in known]), times
        return self._curve

    @property
    def is_known(self) -> bool:
        return bool(self._seconds)

    def knows(self, num_tokens: int) -> bool:
        """True if steps of about this size were measured."""
        return any(num_tokens / NEAR <= size <= num_tokens * NEAR for size, _ in self._seconds.values())

    @property
    def smallest(self) -> tuple[float, float]:
        """Tokens and seconds of the smallest steps measured; only if something was measured."""
        sizes, times = self._known()
        return float(sizes[0]), float(times[0])

    @property
    def largest(self) -> float:
        """Tokens of the largest steps measured; only if something was measured."""
        return float(self._known()[0][-1])

    def seconds(self, num_tokens: float) -> float:
        """Predicted; only if something was measured."""
        sizes, times = self._known()
        last_size, last = float(sizes[-1]), float(times[-1])
        if num_tokens <= last_size:
            return float(np.interp(num_tokens, sizes, times))
        return last * (1 + FREE_SHARE * (num_tokens / last_size - 1))


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """What was decided for a step, for figures and `/explain`."""

    max_drafts: int
    min_probability: float
    is_probe: bool = False
    measures_plain: bool = False
    """The step must have no drafts of any kind."""


NO_DRAFTS = DraftDecision(0, 0.0)


class DraftControl:
    def __init__(
        self, capacity: int, max_drafts: int, *, is_padded: bool, fixed: bool = False, is_weighed: bool = False
    ) -> None:
        """`is_padded`: every row of a step is computed with all places, used or not. `fixed`: always `max_drafts`.
        `is_weighed`: drafters propose no draft below `min_probability`; that alone decides how many there are."""
        self._is_padded, self._fixed, self._max_drafts = is_padded, fixed, max_drafts
        self._is_weighed = is_weighed
        self._lengths = (*(length for length in LENGTHS if length < max_drafts), max_drafts)
        self.survival = np.zeros((capacity, MAX_DRAFTS))
        """By row: share of steps in which the first, second ... draft was accepted."""
        self._offered = np.zeros((capacity, MAX_DRAFTS))
        """By row: share of steps that had a first, second ... draft."""
        self.mean_survival = FIRST_ACCEPTANCE ** np.arange(1.0, MAX_DRAFTS + 1)
        self._mean_offered = np.ones(MAX_DRAFTS)
        """What a new row starts from."""
        if is_weighed:
            self._mean_offered[1:] = self.mean_survival[:-1]
        self._request_ids = np.full(capacity, -1, np.int64)
        self._plain, self._drafted = StepCosts(), StepCosts()
        # Times of longer steps are assumed to be short until measured, so a medium length finds the best one.
        self._length = self._lengths[len(self._lengths) // 2] if is_padded else max_drafts
        """In use; 0: none."""
        self._last_probe = LAST_PROBE if is_padded else LAST_CHEAP_PROBE
        self._wait, self._left = FIRST_PROBE, 0
        """Steps between probes, and until the next one."""
        self._num_active = LASTING
        """Steps with drafts since the last probe that succeeded."""
        self._plain_left, self._until_plain = 0, 0
        """Steps that go without drafts to be measured, and steps until the next such time."""
        self._floor, self._floor_rows, self._floor_left = 0.0, 0, 0
        """With weighed drafts: the least probability, for so many rows, and the steps for which it still holds."""
        self._until_forgotten = FORGET_EVERY
        """Measured steps."""
        self._num_judged = 0
        """Probing steps that did not make drafts begin again."""
        self.num_probes = self.num_stops = 0
        """Steps that tried again, and times that drafts ended because they lost."""

    @property
    def length(self) -> int:
        """Drafts of each row in use; 0 while they lose."""
        return self._max_drafts if self._fixed else self._length

    def decide(self, rows: Int64s, request_ids: Int64s) -> DraftDecision:
        """For a step in which these rows decode."""
        if self._fixed:
            return DraftDecision(self._max_drafts, 0.0)
        if self._length == 0:
            self._left -= 1
            if self._left > 0:
                return NO_DRAFTS
            if self._left <= -NUM_PROBES:
                self._left = self._wait
                return NO_DRAFTS
            self.num_probes += 1
            self._greet(rows, request_ids)
            return DraftDecision(self._best(rows)[0], 0.0, is_probe=True)
        if self._measures_plain(len(rows)):
            return DraftDecision(0, 0.0, measures_plain=True)
        if self._is_weighed:
            return DraftDecision(self._max_drafts, self._shared_floor(rows, request_ids))
        self._num_active += 1
        self._greet(rows, request_ids)
        self._choose(rows)
        if self._length == 0:
            return NO_DRAFTS
        return DraftDecision(self._length, self._break_even(rows))

    @property
    def steps_without(self) -> int:
        """While drafts lose: steps until the next probe. 0 otherwise."""
        return max(0, self._left - 1) if self._length == 0 and not self._fixed else 0

    def skip(self) -> None:
        """A step passed in which it was known that nothing would be drafted."""
        if self._length == 0:
            self._left -= 1

    def observe_drafts(self, rows: Int64s, request_ids: Int64s, drafts: Int32s, accepted: Int32s) -> None:
        """What became of the drafts of a step. `drafts`: those that each row had, or places if that is not known."""
        self._greet(rows, request_ids)
        is_probing = self._length == 0
        few, many = PROBE_LEARN if is_probing else LEARN
        weight = few + (many - few) * min(1.0, (len(rows) - 1) / MANY_ROWS)
        places = np.arange(1, MAX_DRAFTS + 1)
        deepest = int(drafts.max(initial=0))
        offered, survived = drafts[:, None] >= places, accepted[:, None] >= places
        self._offered[rows] += weight * (offered - self._offered[rows])
        if deepest == 0:
            return
        # Where only likely drafts are proposed, the others count as rejected.
        deepest = MAX_DRAFTS if self._is_weighed else deepest
        survival = self.survival[rows]
        survival[:, :deepest] += weight * (survived - survival)[:, :deepest]
        # Places that were not tried are assumed to be right as often as the first one, given those before.
        for place in range(deepest, MAX_DRAFTS):
            survival[:, place] = survival[:, place - 1] * survival[:, 0]
        self.survival[rows] = survival
        mean_weight = MEAN_LEARN if len(rows) == 1 else weight
        self.mean_survival += mean_weight * (survival.mean(axis=0) - self.mean_survival)
        self._mean_offered += mean_weight * (self._offered[rows].mean(axis=0) - self._mean_offered)
        if is_probing:
            self._judge_probe(rows)

    def observe_time(self, num_rows: int, num_tokens: int, seconds: float, *, has_places: bool) -> None:
        """A step in which rows only decode took this long. `num_tokens`: those it computed, unused places included
        where they are computed."""
        (self._drafted if has_places else self._plain).observe(num_tokens, seconds)
        self._until_forgotten -= 1
        if self._until_forgotten == 0 and not self._is_padded:
            self._drafted.forget_old()
            self._until_forgotten = FORGET_EVERY

    def step_s(self, num_rows: int, num_tokens: float) -> float | None:
        """Predicted time of a decode step that computes so many tokens; None if nothing was measured."""
        if self._drafted.is_known and (num_tokens > num_rows or not self._plain.is_known):
            return self._drafted_s(num_rows, num_tokens)
        return self._plain.seconds(num_tokens) if self._plain.is_known else None

    def _measures_plain(self, num_rows: int) -> bool:
        if self._plain_left:
            self._plain_left -= 1
            return True
        # Soon if steps of this size were never measured, else now and then.
        every = PLAIN_EVERY if self._plain.knows(num_rows) else NUM_PLAIN + 1
        self._until_plain = min(self._until_plain, every) - 1
        if self._until_plain > 0:
            return False
        self._until_plain = every
        self._plain_left = NUM_PLAIN - 1
        return True

    def _greet(self, rows: Int64s, request_ids: Int64s) -> None:
        """Rows that another request has now start from the average."""
        is_new = self._request_ids[rows] != request_ids
        if is_new.any():
            new = rows[is_new]
            self._request_ids[new] = request_ids[is_new]
            self.survival[new], self._offered[new] = self.mean_survival, self._mean_offered

    def _rate(self, rows: Int64s, length: int) -> float:
        """Expected tokens per second."""
        num_rows = len(rows)
        if length == 0:
            return num_rows / self._plain.seconds(num_rows)
        accepted = self._accepted(rows, length) * num_rows
        return (num_rows + accepted) / self._drafted_s(num_rows, self._computed(rows, length))

    def _accepted(self, rows: Int64s, length: int) -> float:
        """Expected accepted drafts of a row in a step."""
        return float(self.survival[rows, :length].sum()) / len(rows)

    def _is_worth_trying(self, rows: Int64s, length: int, min_accepted: float) -> bool:
        return not self._is_padded or self._accepted(rows, length) >= min_accepted

    def _drafted_s(self, num_rows: int, num_tokens: float) -> float:
        """Predicted time of a step with places. Below all that were measured, it approaches that of a plain one."""
        least, known = self._drafted.smallest
        if num_tokens >= least or not self._plain.is_known or least <= num_rows:
            return self._drafted.seconds(num_tokens)
        plain = min(self._plain.seconds(num_rows), known)
        return plain + (known - plain) * (num_tokens - num_rows) / (least - num_rows)

    def _best(self, rows: Int64s) -> tuple[int, float]:
        """The number of drafts with the highest expected rate, and that rate."""
        if not self._drafted.is_known:
            return self._max_drafts, math.inf
        return max(((length, self._rate(rows, length)) for length in self._lengths), key=lambda pair: pair[1])

    def _computed(self, rows: Int64s, length: int) -> float:
        if self._is_padded:
            return len(rows) * (1.0 + length)
        return len(rows) + float(self._offered[rows, :length].sum())

    def _choose(self, rows: Int64s) -> None:
        if not self._drafted.is_known:
            return
        best, rate = self._best(rows)
        current = self._rate(rows, self._length)
        if rate > KEEPS * current:
            self._length, current = best, rate
        loses = self._plain.knows(len(rows)) and current < LOSES * self._rate(rows, 0)
        if loses or not self._is_worth_trying(rows, self._length, MIN_ACCEPTED):
            self._stop()

    def _stop(self) -> None:
        """Drafts lose. If they began not long ago, a probe was wrong: the next one waits longer."""
        is_short = self._num_active < LASTING
        self._wait = min(2 * self._wait, self._last_probe) if is_short else FIRST_PROBE
        self._length, self._left, self._num_active = 0, self._wait, 0
        self.num_stops += 1

    def _judge_probe(self, rows: Int64s) -> None:
        """Begin again, or wait longer."""
        best, rate = self._best(rows)
        wins = not self._plain.is_known or rate > WINS * self._rate(rows, 0)
        if wins and self._is_worth_trying(rows, best, 2 * MIN_ACCEPTED):
            self._length = best
        else:
            self._num_judged += 1
            if self._num_judged % NUM_PROBES == 0:
                self._wait = min(2 * self._wait, self._last_probe)

    def _shared_floor(self, rows: Int64s, request_ids: Int64s) -> float:
        self._floor_left -= 1
        if self._floor_left < 0 or self._floor_rows != len(rows):
            self._greet(rows, request_ids)
            self._floor, self._floor_rows, self._floor_left = self._break_even(rows), len(rows), FLOOR_STEPS - 1
        return self._floor

    def _break_even(self, rows: Int64s) -> float:
        """Probability from which on one more draft pays: the time that it adds, in tokens at the present rate."""
        if self._is_padded or not self._drafted.is_known:
            return 0.0
        num_rows = len(rows)
        most = num_rows * (1.0 + self._length)
        if self._drafted.largest > num_rows:  # beyond, times are guessed
            most = min(most, self._drafted.largest)
        more_s = self._drafted_s(num_rows, most) - self._drafted_s(num_rows, num_rows)
        return min(MAX_MIN_PROBABILITY, more_s / (most - num_rows) * self._rate(rows, self._length))
