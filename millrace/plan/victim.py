"""Chooses the row to preempt when blocks run out: the one that is cheapest to recompute."""

from __future__ import annotations

import numpy as np

from millrace.plan.rows import Rows


def cheapest_victim(rows: Rows) -> int | None:
    """The row to preempt, or None. The first row in order always stays, so one request always makes progress.

    The cost is the number of tokens to recompute (not counting those found in the prefix cache), multiplied by one
    plus the number of earlier preemptions. Among equals, the last row in order is chosen.
    """
    candidates = rows.order[1:]
    if len(candidates) == 0:
        return None
    lost = rows.computed[candidates] - rows.num_shared[candidates] * rows.block_size
    preemptions = np.asarray([rows.request(row).preemptions for row in candidates.tolist()])
    cost = (lost + 1) * (1 + preemptions)
    return int(candidates[len(cost) - 1 - int(np.argmin(cost[::-1]))])
