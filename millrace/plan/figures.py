"""Figures of the scheduler's parts, as fields of `PlannerFigures`."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.plan.drafts import DraftState
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.prefix import PrefixIndex
from millrace.plan.kv.states.checkpoints import CheckpointFigures
from millrace.plan.preempting import Preempting
from millrace.plan.queue.waiting import WaitingQueue
from millrace.plan.request import NUM_CLASSES
from millrace.plan.rows.rows import Rows
from millrace.plan.seating import Seating


def figures_of_queue(seating: Seating, waiting: WaitingQueue, preempting: Preempting, now: float) -> dict[str, Any]:
    return {
        "running": len(seating),
        "waiting": len(waiting),
        "rows_free": seating.rows.num_free,
        "waiting_by_class": tuple(waiting.num_by_class),
        "waiting_tokens": waiting.tokens.by_class(),
        "aged_by_class": waiting.num_aged(now),
        "preemptions": preempting.num_preemptions,
        "yields": preempting.num_yields,
        "recomputed_tokens": seating.num_recomputed,
        "running_prefill_tokens": prefill_tokens(seating.rows),
    }


def prefill_tokens(rows: Rows) -> tuple[int, ...]:
    """By class: tokens of running prompts that no step computes yet."""
    order = rows.order
    left = np.maximum(rows.num_prompt[order] - rows.computed[order], 0)
    return tuple(np.bincount(rows.priority[order], left, NUM_CLASSES).astype(int).tolist())


def figures_of_cache(pool: BlockPool, prefix: PrefixIndex) -> dict[str, Any]:
    states = CheckpointFigures() if prefix.checkpoints is None else prefix.checkpoints.figures()
    return {
        "blocks_total": pool.total,
        "blocks_free": pool.num_free,
        "blocks_cached": pool.num_cached,
        "blocks_retained": pool.cached.num_retained,
        "prefix_hit_tokens": prefix.hit_tokens,
        "prefix_query_tokens": prefix.query_tokens,
        "evictions": pool.num_evicted,
        "evicted_for_arrivals": pool.num_evicted_for_arrivals,
        "evicted_retained": pool.cached.num_evicted_retained,
        "host_blocks_lost": pool.cached.num_lost,
        "state_slots_total": states.total,
        "state_slots_used": states.used,
        "state_slot_bytes": states.slot_bytes,
        "state_hits": states.hits,
        "state_evictions": states.evictions,
    }


def figures_of_drafts(state: DraftState) -> dict[str, Any]:
    return {"draft_length": state.length, "draft_probes": state.num_probes, "draft_stops": state.num_stops}
