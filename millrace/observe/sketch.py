"""A sketch of latencies: exact while there are few values, within 1% of the measured value when there are many.

Values are kept with their counts. A line with more than `MAX_EXACT` different values is rounded to logarithmic buckets,
as in DDSketch (Masson, Rim and Lee, 2019). Rounding a rounded value changes nothing, so sketches can be merged in any
order without adding to the error.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ACCURACY = 0.01
MAX_EXACT = 128
"""Different values of a line that are kept as they are."""
SMALLEST = 1e-7
"""Values below it are 0 after rounding."""
MAX_PENDING = 1 << 15
"""Rows that may wait before equal values are joined."""
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)


class Sketch:
    def __init__(self, data: bytes = b"") -> None:
        self._parts: list[Floats] = [np.frombuffer(data, np.float64).reshape(-1, 3)] if data else []
        """Rows of line, value and count."""
        self._num_pending = 0

    def add(self, lines: npt.NDArray[np.integer], values: Floats, nums: npt.NDArray[np.integer] | None = None) -> None:
        """`nums`: how often each value counts; once by default."""
        counts = np.ones(len(values)) if nums is None else nums
        self._append(np.column_stack([lines, values, counts]).astype(np.float64))

    def merge(self, other: Sketch) -> None:
        self._append(other._rows())

    def take(self) -> Sketch:
        """A sketch of what was added since the last `take`."""
        taken = Sketch()
        taken._parts, self._parts, self._num_pending = [self._rows()], [], 0
        return taken

    def tobytes(self) -> bytes:
        return self._rows().tobytes()

    def of(self, first: int, last: int) -> tuple[Floats, Floats]:
        """Values of these lines in ascending order, and their counts."""
        rows = self._rows()
        chosen = rows[(rows[:, 0] >= first) & (rows[:, 0] <= last)]
        chosen = chosen[chosen[:, 1].argsort(kind="stable")]
        return chosen[:, 1], chosen[:, 2]

    def _append(self, rows: Floats) -> None:
        if len(rows):
            self._parts.append(rows)
            self._num_pending += len(rows)
            if self._num_pending > MAX_PENDING:
                self._rows()

    def _rows(self) -> Floats:
        if len(self._parts) != 1:
            self._parts = [_joined(np.concatenate(self._parts))] if self._parts else [np.zeros((0, 3))]
        elif self._num_pending:
            self._parts = [_joined(self._parts[0])]
        self._num_pending = 0
        return self._parts[0]


def _joined(rows: Floats) -> Floats:
    rows = _without_repeats(rows)
    lines, nums = np.unique(rows[:, 0], return_counts=True)
    is_rounded = np.isin(rows[:, 0], lines[nums > MAX_EXACT])
    if not is_rounded.any():
        return rows
    rows[is_rounded, 1] = rounded(rows[is_rounded, 1])
    return _without_repeats(rows)


def _without_repeats(rows: Floats) -> Floats:
    """One row per line and value, in their order."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    is_first = np.append(True, (rows[1:, :2] != rows[:-1, :2]).any(axis=1))[: len(rows)]
    starts = is_first.nonzero()[0]
    found: Floats = rows[starts]
    if len(found):
        found[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return found


def rounded(values: Floats) -> Floats:
    """Each value within `ACCURACY` of itself."""
    buckets = np.ceil(np.log(np.maximum(values, SMALLEST)) / _LOG_GAMMA)
    found: Floats = np.where(values < SMALLEST, 0.0, np.exp(buckets * _LOG_GAMMA) * 2 / (_GAMMA + 1))
    return found


def quantile(values: Floats, counts: Floats | None, share: float) -> float | None:
    """The smallest of the ascending values that at least this share of all does not exceed: never a value that was not
    measured. None without values."""
    if not len(values):
        return None
    cumulated = np.arange(1, len(values) + 1) if counts is None else counts.cumsum()
    rank = max(1.0, math.ceil(share * float(cumulated[-1]) - 1e-9))
    return float(values[min(int(cumulated.searchsorted(rank)), len(values) - 1)])
