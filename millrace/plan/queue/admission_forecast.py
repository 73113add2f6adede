"""Admission: the requests that share the pool, and whether one more fits at their future peak. Counts in tokens."""

from __future__ import annotations

import numpy as np

from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.queue.kv_peak import Floats, OutputLengthEstimate, kv_peak
from millrace.plan.request import Request
from millrace.plan.rows import Rows
from millrace.plan.step import Int64s

_NOBODY: Floats = np.zeros(0)


class AdmissionForecast:
    """Made for one round of seating. A block that several share is counted once, as room that is gone."""

    def __init__(self, rows: Rows, pool: BlockPool, lengths: OutputLengthEstimate) -> None:
        self._pool, self._lengths, self._block_size = pool, lengths, rows.block_size
        order, size = rows.order, rows.block_size
        self._is_empty = len(order) == 0
        self._own: Floats = _NOBODY
        self._remaining: Floats = _NOBODY
        self._joined: list[tuple[float, float]] = []
        """Tokens held and still to come of those that joined."""
        self._bound = 0.0
        """What they would hold if none ended before the last: never below the peak, and cheap to keep."""
        self._room = pool.total * size
        if not self._is_empty:
            self._count_in(rows, order)

    def _count_in(self, rows: Rows, order: Int64s) -> None:
        pool, size = self._pool, self._block_size
        known = rows.known[order].astype(np.float64)
        own: Floats = np.ceil(known / size) * size - rows.num_shared[order].astype(np.float64) * size
        remaining = self._lengths.remaining(known - rows.num_prompt[order], rows.limit[order] - known)
        own_blocks = int((rows.num_blocks[order] - rows.num_shared[order]).sum())
        self._room = (pool.total - max(pool.num_in_use - own_blocks, 0)) * size
        self._own, self._remaining = own, remaining
        self._bound = float(own.sum() + remaining.sum())

    def join(self, request: Request, blocks: list[int]) -> bool:
        """Count the request in, with these blocks found in the cache, if it fits. Somebody may always run."""
        size, num_known = self._block_size, len(request.history) // 4
        own = -(-num_known // size) * size - len(blocks) * size
        remaining = self._lengths.remaining_of_one(num_known - request.num_prompt, request.limit - num_known)
        newly_shared = self._pool.num_unheld(blocks) if blocks else 0
        if not self._is_empty:
            has_block_left = self._pool.num_available > len(blocks)
            if not has_block_left or not self._fits(own, remaining, self._room - newly_shared * size):
                return False
        self._joined.append((own, remaining))
        self._bound += own + remaining
        self._room -= newly_shared * size
        self._is_empty = False
        return True

    def _fits(self, own: float, remaining: float, room: float) -> bool:
        if self._bound + own + remaining <= room:
            return True
        joined = np.array([*self._joined, (own, remaining)])
        peak = kv_peak(np.concatenate([self._own, joined[:, 0]]), np.concatenate([self._remaining, joined[:, 1]]))
        return peak <= room
