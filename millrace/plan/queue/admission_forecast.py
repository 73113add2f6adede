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
from millrace.plan.rows import Rows
from millrace.plan.step import Int64s

_NO_ROWS: Floats = np.zeros(0)


class AdmissionForecast:
    """Created for each step that admits requests. A block shared by several rows is counted once."""

    def __init__(self, rows: Rows, pool: BlockPool, groups: KvGroups, lengths: OutputLengthEstimate) -> None:
        self._pool, self._lengths, self._block_size = pool, lengths, rows.block_size
        self._num_full = groups.num_full
        self._windows = [window for _, window in groups.windowed]
        order, size = rows.order, rows.block_size
        self._is_empty = len(order) == 0
        self._own: Floats = _NO_ROWS
        """Tokens in the blocks of each row, without blocks found in the prefix cache; whole blocks."""
        self._remaining: Floats = _NO_ROWS
        """Expected tokens still to come, per row."""
        self._admitted: list[tuple[float, float]] = []
        """Own and remaining tokens of the requests admitted by this forecast."""
        self._bound = 0.0
        """Upper bound on the KV peak: assumes that no request ends early."""
        self._room = pool.total * size
        """Tokens that fit in the pool beside the blocks found in the prefix cache."""
        if not self._is_empty:
            self._add_running(rows, order)

    def _add_running(self, rows: Rows, order: Int64s) -> None:
        pool, size = self._pool, self._block_size
        known = rows.known[order].astype(np.float64)
        shared = rows.num_shared[order].astype(np.float64) * size
        remaining = self._lengths.remaining(known - rows.num_prompt[order], rows.limit[order] - known)
        own: Floats = (np.ceil(known / size) * size - shared) * self._num_full
        own_blocks = int((rows.num_blocks[order] - rows.num_shared[order]).sum()) * self._num_full
        for window in self._windows:
            own = own + np.minimum(known + remaining, window + size)
        own_blocks += int((rows.num_blocks[order] - rows.num_dropped[:, order]).sum()) if self._windows else 0
        self._room = (pool.total - max(pool.num_in_use - own_blocks, 0)) * size
        self._own, self._remaining = own, remaining
        self._bound = float(own.sum() + remaining.sum() * self._num_full)

    def admit(self, request: Request, match: Match) -> bool:
        """Count the request in if it fits. `match` was found in the prefix cache. The first request always fits."""
        size, num_known, blocks = self._block_size, len(request.history) // 4, match.found
        remaining = self._lengths.remaining_of_one(num_known - request.num_prompt, request.limit - num_known)
        own: float = (-(-num_known // size) - match.num_columns) * size * self._num_full
        own += sum(min(num_known + remaining, window + size) for window in self._windows)
        newly_shared = self._pool.num_unreferenced(blocks) if blocks else 0
        if not self._is_empty:
            has_block_left = self._pool.num_available + self._pool.num_soon > len(blocks)
            if not has_block_left or not self._fits(own, remaining, self._room - newly_shared * size):
                return False
        self._admitted.append((own, remaining))
        self._bound += own + remaining * self._num_full
        self._room -= newly_shared * size
        self._is_empty = False
        return True

    def _fits(self, own: float, remaining: float, room: float) -> bool:
        if self._bound + own + remaining * self._num_full <= room:  # Avoids computing the exact peak in most cases.
            return True
        admitted = np.array([*self._admitted, (own, remaining)])
        held = np.concatenate([self._own, admitted[:, 0]])
        return kv_peak(held, np.concatenate([self._remaining, admitted[:, 1]]), self._num_full) <= room
