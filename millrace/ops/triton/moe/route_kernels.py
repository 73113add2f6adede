"""Kernels that route tokens to experts and group slots by expert; `experts.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.dependent_launch import wait_for_previous_kernel
from millrace.ops.triton.moe.kernels import prefetch_kept


@triton.jit(do_not_specialize=["tokens", "capacity", "at_once"])
def route_kernel(
    logits,
    weights,
    ids,
    counts,
    table,
    gate_up,
    row_stride,
    tokens,
    capacity,
    at_once,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token per program: its TOP_K largest logits, the lower expert first among equals, and their softmax weights.

    GROUP: count its slots per expert and put them into the experts' rows of the table [E, capacity], in the order in
    which tokens arrive; no result depends on it. `counts` must be zero.
    AHEAD: 0, or bytes of `gate_up` that each program past the last token prefetches, one share after the other: with
    many tokens nearly every expert is chosen, and until the choice is known memory would be idle. The first `at_once`
    of them do so while the router still runs, which has already requested its own weights. The prefetched lines are
    kept in L2: the experts' kernel would otherwise evict what it has not read yet.
    """
    if AHEAD > 0:
        share = tl.program_id(0) - tokens
        if share >= 0:
            if share >= at_once:
                wait_for_previous_kernel(EARLY)
            PIECE: tl.constexpr = AHEAD // 64
            pieces = gate_up.to(tl.pointer_type(tl.int8)) + share.to(tl.int64) * AHEAD + tl.arange(0, 64) * PIECE
            prefetch_kept(pieces, PIECE)
            return
    wait_for_previous_kernel(EARLY)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERT_BLOCK)
    choices = tl.arange(0, CHOICES)
    row = tl.load(logits + token * row_stride + experts, mask=experts < EXPERTS, other=float("-inf")).to(tl.float32)
    largest = tl.max(row, 0)
    total = tl.sum(tl.exp(row - largest), 0)
    chosen = tl.zeros([CHOICES], tl.int32)
    values = tl.full([CHOICES], float("-inf"), tl.float32)
    for choice in tl.static_range(TOP_K):
        value, index = tl.max(row, 0, return_indices=True)
        values = tl.where(choices == choice, value, values)
        # NaN logits could select an index past the last expert, which must not be read.
        chosen = tl.where(choices == choice, tl.minimum(index, EXPERTS - 1), chosen)
        row = tl.where(experts == index, float("-inf"), row)
    shares = tl.exp(values - largest)
    if RENORMALISE:
        total = tl.sum(shares, 0)
    shares = shares / total
    real = choices < TOP_K
    tl.store(weights + token * TOP_K + choices, shares, mask=real)
    tl.store(ids + token * TOP_K + choices, chosen, mask=real)
    if GROUP:
        ranks = tl.atomic_add(counts + chosen, 1, mask=real, sem="relaxed")
        slots = (token * TOP_K + choices).to(tl.int32)
        tl.store(table + chosen.to(tl.int64) * capacity + ranks, slots, mask=real & (ranks < capacity))


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def group_kernel(ids, counts, table, num_slots, capacity, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One expert per program: count the slots that chose it and list them, in order, in its row of the table
    [E, capacity]."""
    wait_for_previous_kernel(EARLY)
    expert = tl.program_id(0)
    places = table + expert.to(tl.int64) * capacity
    offsets = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, num_slots, BLOCK):
        slots = start + offsets
        mine = tl.load(ids + slots, mask=slots < num_slots, other=-1).to(tl.int32) == expert
        ranks = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places + ranks, slots, mask=mine & (ranks < capacity))
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, tl.minimum(count, capacity))
