"""Plans written for one KV group, for models that have several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from millrace.plan.step import StepPlan


def for_groups(plan: StepPlan, num_groups: int, stride: int) -> StepPlan:
    """Every group gets the same updates of its block table; the blocks of group `g` are `g * stride` further on."""
    if num_groups == 1:
        return plan
    groups = np.repeat(np.arange(num_groups, dtype=np.int32), len(plan.block_ids))
    return replace(
        plan,
        block_groups=groups,
        block_rows=np.tile(plan.block_rows, num_groups),
        block_cols=np.tile(plan.block_cols, num_groups),
        block_ids=np.tile(plan.block_ids, num_groups) + groups * np.int32(stride),
    )
