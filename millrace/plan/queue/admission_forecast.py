"""The admission forecast: does one more request fit at the future peak of KV memory?

Counts in block tokens: a block of any KV group counts as `block_size`. In groups with a window a row never holds more
than the window covers, and is counted with what it will hold there at the end.
"""

from __future__ import annotations

import numpy as np

from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.prefix import Match
from millrace.plan.queue.kv_peak import Floats, OutputLengthEstimate, kv_peak
from millrace.plan.request import Request
from millrace.plan.rows.rows import Rows


class AdmissionForecast:
    """Created for each step that admits requests, which are seated one by one. A block shared by several rows is
    counted once."""

    def __init__(
        self, rows: Rows, pool: BlockPool, groups: KvGroups, lengths: OutputLengthEstimate, most_blocks: int
    ) -> None:
        """`most_blocks`: upper bound on the blocks of the seated requests, whatever they generate."""
        self._rows, self._pool, self._groups, self._lengths = rows, pool, groups, lengths
        self._most_blocks = most_blocks
        self._peak: PeakForecast | None = None
        """None while all requests fit without one."""

    def admit(self, request: Request, match: Match) -> bool:
        """Count the request in if it fits. `match` was found in the prefix cache. The first request always fits."""
        self._most_blocks += -(-request.limit // self._rows.block_size) * self._rows.num_groups
        if not self._rows.num_active:
            return True
        found = match.found
        if self._pool.num_available + self._pool.num_soon <= len(found):
            return False
        if self._peak is None:
            if self._most_blocks <= self._pool.total - self._pool.num_reserved:
                return True
            self._peak = PeakForecast(self._rows, self._pool, self._groups, self._lengths)
        return self._peak.admit(request, match.num_columns, self._pool.num_unreferenced(found))


class PeakForecast:
    """The future peak of the seated requests, by the tokens that each will probably generate."""

    def __init__(self, rows: Rows, pool: BlockPool, groups: KvGroups, lengths: OutputLengthEstimate) -> None:
        self._lengths, self._block_size = lengths, rows.block_size
        self._num_full = groups.num_full
        self._windows = [window for _, window in groups.windowed]
        order, size = rows.order, rows.block_size
        known = rows.known[order].astype(np.float64)
        shared = rows.num_shared[order].astype(np.float64) * size
        remaining = lengths.remaining(known - rows.num_prompt[order], rows.limit[order] - known, rows.expected[order])
        own: Floats = (np.ceil(known / size) * size - shared) * self._num_full
        own_blocks = int((rows.num_blocks[order] - rows.num_shared[order]).sum()) * self._num_full
        for window in self._windows:
            own = own + np.minimum(known + remaining, window + size)
        own_blocks += int((rows.num_blocks[order] - rows.num_dropped[:, order]).sum()) if self._windows else 0
        self._room = (pool.total - pool.num_reserved - max(pool.num_in_use - own_blocks, 0)) * size
        """Tokens that fit in the pool beside the blocks found in the prefix cache and those that handles name."""
        self._own, self._remaining = own, remaining
        """Per row: tokens in its blocks, without those found in the prefix cache (whole blocks), and expected tokens
        still to come."""
        self._bound = float(own.sum() + remaining.sum() * self._num_full)
        """Upper bound on the KV peak: assumes that no request ends early."""
        self._admitted: list[tuple[float, float]] = []
        """Own and remaining tokens of the requests admitted by this forecast."""

    def admit(self, request: Request, num_columns: int, newly_shared: int) -> bool:
        """`num_columns` blocks were found in the prefix cache, of which `newly_shared` are not in use yet."""
        size, num_known = self._block_size, len(request.history) // 4
        generated, left = num_known - request.num_prompt, request.limit - num_known
        remaining = self._lengths.remaining_of_one(generated, left, self._lengths.expected(request))
        own: float = (-(-num_known // size) - num_columns) * size * self._num_full
        own += sum(min(num_known + remaining, window + size) for window in self._windows)
        if not self._fits(own, remaining, self._room - newly_shared * size):
            return False
        self._admitted.append((own, remaining))
        self._bound += own + remaining * self._num_full
        self._room -= newly_shared * size
        return True

    def _fits(self, own: float, remaining: float, room: float) -> bool:
        if self._bound + own + remaining * self._num_full <= room:  # Avoids computing the exact peak in most cases.
            return True
        admitted = np.array([*self._admitted, (own, remaining)])
        held = np.concatenate([self._own, admitted[:, 0]])
        return kv_peak(held, np.concatenate([self._remaining, admitted[:, 1]]), self._num_full) <= room
