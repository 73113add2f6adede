"""The last steps as columns: when they ran, with what batch, what they read and computed. For traces and profiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.observe.histograms import Floats

CAPACITY = 4096
COLUMNS = ("step_no", "launched", "done", "device_s", "rows", "prefill_tokens", "decode_tokens", "bytes", "flops")
_TIMES = ("launched", "done", "device_s")


class StepHistory:
    def __init__(self) -> None:
        self._columns = np.zeros((CAPACITY, len(COLUMNS)))
        self._num = 0

    def add(self, steps: Floats) -> None:
        """`steps` [steps, columns]: at most `CAPACITY` of them."""
        self._columns[np.arange(self._num, self._num + len(steps)) % CAPACITY] = steps
        self._num += len(steps)

    def last(self, count: int) -> dict[str, Any]:
        """The last `count` steps as lists, oldest first. Times are on `time.monotonic`."""
        count = min(count, self._num, CAPACITY)
        places = np.arange(self._num - count, self._num) % CAPACITY
        found = {"object": "steps", "num_steps": self._num}
        for index, name in enumerate(COLUMNS):
            column = self._columns[places, index]
            found[name] = column.round(7).tolist() if name in _TIMES else column.astype(np.int64).tolist()
        return found
