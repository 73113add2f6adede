"""The last steps as columns: when they ran, with what batch, what they read and computed. For traces and profiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.engine.cycle import Confirmed
from millrace.engine.figures.step_figures import StepFigures

CAPACITY = 4096
COLUMNS = ("step_no", "launched", "done", "device_s", "rows", "prefill_tokens", "decode_tokens", "bytes", "flops")
_TIMES = ("launched", "done", "device_s")


class StepLog:
    def __init__(self) -> None:
        self._columns = np.zeros((CAPACITY, len(COLUMNS)))
        self._num = 0
        self._before = (0, 0, 0.0, 0.0)

    def note(self, done: Confirmed, figures: StepFigures) -> None:
        """Once per step, after `figures` counted it."""
        totals = (figures.prefill_tokens, figures.decode_tokens, figures.bytes_read, figures.flops)
        before, self._before = self._before, totals
        self._columns[self._num % CAPACITY] = (
            done.plan.step_no,
            done.launched_at,
            done.at,
            done.device_s,
            len(done.plan.rows),
            totals[0] - before[0],
            totals[1] - before[1],
            totals[2] - before[2],
            totals[3] - before[3],
        )
        self._num += 1

    def last(self, count: int) -> dict[str, Any]:
        """The last `count` steps as lists, oldest first. Times are on `time.monotonic`."""
        count = min(count, self._num, CAPACITY)
        places = np.arange(self._num - count, self._num) % CAPACITY
        found = {"object": "steps", "num_steps": self._num}
        for index, name in enumerate(COLUMNS):
            column = self._columns[places, index]
            found[name] = column.round(7).tolist() if name in _TIMES else column.astype(np.int64).tolist()
        return found
