"""Gaps between the tokens of each sequence. Steps only note which rows got a token; gaps are counted many steps at a
time.

Most rows got their last token in the step before: they share one gap, so each step needs only their number. While no
row is left out, numbers are all there is to count. Else the rows of all noted steps are looked at together.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from millrace.observe.histograms import NUM_CLASSES, Floats, Histograms
from millrace.plan.planner.protocol import RunningRows
from millrace.plan.step import Bools, Int32s, Int64s

MAX_STEPS = 128
"""Steps that are noted before their gaps must be counted."""

Marks = npt.NDArray[np.int16]


class TokenGaps:
    def __init__(self, rows: RunningRows, histograms: Histograms, *, of_some: bool = False) -> None:
        """`of_some`: only some of the running requests are noted, whose rows are always looked at."""
        self._rows = rows
        self._histograms = histograms
        self._of_some = of_some
        self._times = [math.nan]
        """When the noted steps delivered tokens. The first is the last step of the count before."""
        self._noted: list[Int32s] = [np.zeros(0, np.int32)]
        """Rows that got tokens in each of these steps."""
        self._numbers: list[tuple[int, int, int]] = [(0, 0, 0)]
        """Of each of these steps: rows that got a token, for how many it was the first, for how many the last."""
        self._is_current = True
        """As of the last count, every running request that has tokens got one in the last step."""
        self._is_plain = True
        """No noted step gave several tokens to a row."""
        self._known_classes: tuple[int, ...] = ()
        """Of all requests so far."""
        self._classes: list[Int32s] = [np.zeros(0, np.int32)]
        """Classes of the noted rows, if several are known."""
        self._admitted: list[tuple[int, int]] = []
        """The noted step before it, and the row."""
        self._resumed: dict[tuple[int, int], float] = {}
        """The same, for requests that have tokens already: when they got the last one."""
        self._num_together = np.zeros(NUM_CLASSES, np.int64)
        """By class: tokens that came in one step with the token before. Their gap is 0."""
        self._last_token = np.full(rows.capacity, math.nan)
        """By row, as of the last count: when its request got its last token; NaN if it has none."""

    def last_token_at(self, row: int) -> float:
        self.count()
        return float(self._last_token[row])

    def on_admitted(self, row: int, last_token: float) -> None:
        """`last_token`: when the request got its last token; NaN if it has none."""
        place = len(self._times) - 1, row
        self._admitted.append(place)
        if last_token == last_token:
            self._resumed[place] = last_token

    def note(self, rows: Int32s, now: float, *, num_first: int, num_last: int, is_distinct: bool) -> None:
        """These rows got tokens. Unless `is_distinct`, one may be there several times in a row. `num_first`: rows whose
        first token it is. `num_last`: rows that ended with it, or fewer."""
        if len(self._rows.classes) > len(self._known_classes):
            self.count()
            self._known_classes = tuple(sorted(self._rows.classes))
        if not is_distinct:
            is_more = rows[1:] == rows[:-1]
            self._num_together += np.bincount(self._rows.priority[rows[1:][is_more]], minlength=NUM_CLASSES)
            rows = rows[np.append(True, ~is_more)]
            self._is_plain = False
        self._times.append(now)
        self._numbers.append((len(rows), num_first, num_last))
        self._noted.append(rows)
        if len(self._known_classes) > 1:
            self._classes.append(self._rows.priority[rows])

    def count(self) -> None:
        """Add the gaps of all noted steps to the histogram."""
        num_steps = len(self._times) - 1
        if not num_steps and not self._admitted:
            return
        if not (num_steps and self._count_numbers()):
            self._count_rows()
        self._times, self._admitted, self._resumed, self._is_plain = self._times[-1:], [], {}, True
        self._numbers, self._classes = self._numbers[-1:], self._classes[:1]

    def _count_numbers(self) -> bool:
        """Count the gaps if every request that has tokens got one in every step. Else returns False."""
        if self._of_some or not (self._is_current and self._is_plain) or self._resumed or len(self._known_classes) > 1:
            return False
        tokens, firsts, lasts = np.array(self._numbers).T
        nums = (tokens - firsts)[1:]
        if (nums != (tokens - lasts)[:-1]).any():
            return False
        has_any = nums > 0
        waits, one = np.diff(self._times)[has_any], self._known_classes[0]
        self._histograms.observe_gaps(waits, np.full(len(waits), one), nums[has_any])
        given = [row for after, row in self._admitted if after == len(nums)]
        self._noted = [np.setdiff1d(self._noted[-1], given)] if given else self._noted[-1:]
        self._last_token[:] = np.nan
        self._last_token[self._noted[0]] = self._times[-1]
        return True

    def _count_rows(self) -> None:
        num_steps = len(self._times) - 1
        times, has_token = np.array(self._times), self._matrix(self._noted)
        # The largest mark of a row is the latest: odd for a token, even for a new request after the step's token.
        numbers = np.arange(1, 2 * num_steps + 2, 2, dtype=np.int16)[:, None]
        marks: Marks = has_token * numbers
        if self._admitted:
            after, rows = np.array(self._admitted).T
            marks[after, rows] = 2 * after + 2
        if num_steps:
            self._observe(times, has_token[1:], marks, has_token[1:] & (marks[:-1] == numbers[:-1]))
        latest: Marks = marks.max(axis=0)
        self._last_token = self._time_of(latest, np.arange(len(latest)), times)
        self._noted = [(latest == numbers[-1]).nonzero()[0].astype(np.int32)]
        self._is_current = not (self._last_token[self._rows.active] < self._times[-1]).any()

    def _matrix(self, noted: list[Int32s]) -> Bools:
        """By step and row: True for the rows noted in the step."""
        found = np.zeros((len(noted), self._rows.capacity), np.bool_)
        places = np.concatenate(noted)
        places += np.arange(0, found.size, found.shape[1], dtype=np.int32).repeat([len(rows) for rows in noted])
        found.reshape(-1)[places] = True
        return found

    def _observe(self, times: Floats, has_token: Bools, marks: Marks, is_common: Bools) -> None:
        """`is_common`: the row got its last token in the step before."""
        observe, waits = self._histograms.observe_gaps, np.diff(times)
        steps, rows = (has_token > is_common).nonzero()
        before = np.where(np.arange(len(times))[:, None] <= steps, marks[:, rows], 0).max(axis=0)
        gaps = times[steps + 1] - self._time_of(before, rows, times)
        has_gap = gaps == gaps  # The others are first tokens.
        for one in self._known_classes:
            is_own = None if len(self._known_classes) == 1 else self._is_of_class(one)
            nums = np.count_nonzero(is_common if is_own is None else is_common & is_own, axis=1)
            has_any = nums > 0
            observe(waits[has_any], np.full(int(has_any.sum()), one), nums[has_any])
            chosen = gaps[has_gap if is_own is None else has_gap & is_own[steps, rows]]
            if len(chosen):
                observe(chosen, np.full(len(chosen), one))
        if self._num_together.any():
            observe(np.zeros(NUM_CLASSES), np.arange(NUM_CLASSES), self._num_together)
            self._num_together[:] = 0

    def _is_of_class(self, one: int) -> Bools:
        """By step and row, without the first step: True for rows that got a token and have this class."""
        pairs = zip(self._noted[1:], self._classes[1:], strict=True)
        return self._matrix([rows[classes == one] for rows, classes in pairs])

    def _time_of(self, latest: Marks, rows: Int64s, times: Floats) -> Floats:
        """When the request of each row got its last token, from the row's latest mark; NaN if it has none."""
        is_token, steps = (latest & 1) == 1, (latest - 1) >> 1
        found: Floats = np.where(is_token, times[steps], np.nan)
        is_unchanged = latest == 0
        found[is_unchanged] = self._last_token[rows[is_unchanged]]
        if self._resumed:
            for at in (~is_token & ~is_unchanged).nonzero()[0].tolist():
                found[at] = self._resumed.get((int(steps[at]), int(rows[at])), math.nan)
        return found
