"""Time that chunks may take from decode rows of a more urgent class, as an account of predicted and measured seconds.

Each step puts in a share of what its rows take alone. A chunk takes out what it is predicted to add to its step, and
the difference once the step is measured: however wrong the prediction, the rows keep their pace on average.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.4
"""Such chunks lengthen steps by this share on average. The steps between them are a tenth longer than without a prompt
(caches, planning), so the rows keep two thirds of their pace."""
FULL_CHUNK, LEAST_CHUNK = 8, 2
"""Steps save up for a chunk of this many tokens, because a chunk has a cost of its own; a late one has at least two."""
PERIODS = (2, 8)
"""Least and most steps from one such chunk to the next. Steps between them show what the rows take alone."""
ALONE_GAIN = 1 / 4
"""Weight of the last step in the mean time of steps without such chunks."""


class YieldingTime:
    def __init__(self) -> None:
        self._saved_s = 0.0
        """Negative if chunks took longer than predicted."""
        self._taken_s = 0.0
        """Predicted time of the chunk whose step is not measured yet."""
        self._alone_s = 0.0
        """Mean measured time of steps without such chunks; 0 if there was none."""
        self._num_steps = 0
        """Planned since the last chunk."""

    def take(self, decode_s: float, tokens_in: Callable[[float], int]) -> int:
        """Tokens of such chunks in the step that is planned. `decode_s`: predicted time of its rows alone.
        `tokens_in`: tokens that add so much time to it."""
        self._saved_s += SHARE * (self._alone_s or decode_s)
        self._num_steps += 1
        least, most = PERIODS
        tokens = tokens_in(self._saved_s)
        if self._num_steps < least or (tokens < FULL_CHUNK and self._num_steps < most):
            return 0
        self._taken_s, self._num_steps = max(self._saved_s, 0.0), 0
        self._saved_s -= self._taken_s
        return max(tokens, LEAST_CHUNK)

    def measure(self, seconds: float, *, has_chunk: bool) -> None:
        """A step took this long, and its chunks, if it had any, yield."""
        if not has_chunk:
            self._alone_s += (ALONE_GAIN if self._alone_s else 1.0) * (seconds - self._alone_s)
        elif self._taken_s and self._alone_s:
            self._saved_s -= seconds - self._alone_s - self._taken_s
            most_s = PERIODS[1] * SHARE * self._alone_s
            self._saved_s = min(max(self._saved_s, -most_s), most_s)
            self._taken_s = 0.0
