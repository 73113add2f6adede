"""Who gives way when blocks run out: the row whose recomputation costs least."""

from __future__ import annotations

import numpy as np

from millrace.plan.rows import Rows


def cheapest_victim(rows: Rows) -> int | None:
    """The row to preempt, or None. The first in the queue always stays, so that somebody always ends.

    The cost is in tokens that would have to be computed again, not counting what was found in the cache; a row that
    was preempted before costs more each time. Among equals it is the last in the queue.
    """
    candidates = rows.order[1:]
    if len(candidates) == 0:
        return None
    lost = rows.computed[candidates] - rows.num_shared[candidates] * rows.block_size
    times = np.asarray([rows.request(row).preemptions for row in candidates.tolist()])
    cost = (lost + 1) * (1 + times)
    return int(candidates[len(cost) - 1 - int(np.argmin(cost[::-1]))])
