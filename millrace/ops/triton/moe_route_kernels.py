"""Kernels that route tokens to experts and group the slots of each. `moe.py` beside this launches them.

A list of tiles [tiles, 4] has for every tile of up to BLOCK_M slots its expert, the place of its first slot in that
expert's row of the table, and how many slots the expert has; tiles without work have the expert -1 and no slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits,
    weights,
    ids,
    row_stride,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token: its TOP_K largest logits, the lower expert first among equals, and their shares of the softmax."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
        # Logits that are not numbers could elect a place past the last expert, which must not be read.
        chosen = tl.where(choices == choice, tl.minimum(index, EXPERTS - 1), chosen)
        row = tl.where(experts == index, float("-inf"), row)
    shares = tl.exp(values - largest)
    if RENORMALISE:
        total = tl.sum(shares, 0)
    shares = shares / total
    real = choices < TOP_K
    tl.store(weights + token * TOP_K + choices, shares, mask=real)
    tl.store(ids + token * TOP_K + choices, chosen, mask=real)


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def group_kernel(ids, counts, table, num_slots, capacity, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One expert: how many slots chose it, and which, in their order, in its row of the table [E, capacity]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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


@triton.jit
def _list_tiles(tiles, experts, counts, first_tiles, most, BLOCK_M: tl.constexpr):
    """Write the tiles of these experts, which begin at `first_tiles`; `most` is how many one of them can have."""
    for number in range(most):
        mine = number * BLOCK_M < counts
        places = tiles + (first_tiles + number) * 4
        tl.store(places, experts, mask=mine)
        tl.store(places + 1, experts * 0 + number * BLOCK_M, mask=mine)
        tl.store(places + 2, counts, mask=mine)


@triton.jit
def _end_list(tiles, begin, max_tiles, TILE_BLOCK: tl.constexpr):
    rest = tl.arange(0, TILE_BLOCK)
    empty = (rest >= begin) & (rest < max_tiles)
    tl.store(tiles + rest * 4, rest * 0 - 1, mask=empty)
    tl.store(tiles + rest * 4 + 1, rest * 0, mask=empty)
    tl.store(tiles + rest * 4 + 2, rest * 0, mask=empty)


@triton.jit(do_not_specialize=["tokens", "max_tiles"])
def route_and_group_kernel(
    logits,
    weights,
    ids,
    tiles,
    table,
    tokens,
    row_stride,
    max_tiles,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """All tokens of a small step in one program: as route_kernel, then the table and the list of tiles."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERT_BLOCK)
    choices = tl.arange(0, CHOICES)
    real = token < tokens
    row = tl.load(
        logits + token[:, None] * row_stride + experts[None, :],
        mask=real[:, None] & (experts < EXPERTS)[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    largest = tl.max(row, 1)
    total = tl.sum(tl.exp(row - largest[:, None]), 1)
    values = tl.full([TOKENS, CHOICES], float("-inf"), tl.float32)
    which = tl.full([TOKENS, EXPERT_BLOCK], -1, tl.int32)
    for choice in tl.static_range(TOP_K):
        value, index = tl.max(row, 1, return_indices=True)
        # Logits that are not numbers could elect a place past the last expert, which must not be read.
        index = tl.minimum(index, EXPERTS - 1)
        values = tl.where((choices == choice)[None, :], value[:, None], values)
        here = experts[None, :] == index[:, None]
        which = tl.where(here & real[:, None], choice, which)
        row = tl.where(here, float("-inf"), row)
        tl.store(ids + token * TOP_K + choice, index, mask=real)
    shares = tl.exp(values - largest[:, None])
    if RENORMALISE:
        total = tl.sum(shares, 1)
    shares = shares / total[:, None]
    places = weights + token[:, None] * TOP_K + choices[None, :]
    tl.store(places, shares, mask=real[:, None] & (choices < TOP_K)[None, :])

    chosen = (which >= 0).to(tl.int32)
    ranks = tl.cumsum(chosen, 0) - chosen
    spots = table + experts[None, :] * tokens + ranks
    tl.store(spots, token[:, None] * TOP_K + which, mask=chosen > 0)
    counts = tl.sum(chosen, 0)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    _list_tiles(tiles, experts, counts, tl.cumsum(needed, 0) - needed, tl.cdiv(tokens, BLOCK_M), BLOCK_M)
    _end_list(tiles, tl.sum(needed, 0), max_tiles, TILE_BLOCK)


@triton.jit(do_not_specialize=["num_slots", "capacity", "max_tiles"])
def group_and_list_kernel(
    ids,
    tiles,
    table,
    num_slots,
    capacity,
    max_tiles,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As group_kernel for one expert; its program also counts all others' slots, to know where its tiles begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    experts = tl.arange(0, 2 * EXPERT_BLOCK)
    places = table + expert.to(tl.int64) * capacity
    offsets = tl.arange(0, BLOCK)
    count = 0
    counts = tl.zeros([2 * EXPERT_BLOCK], tl.int32)
    for start in range(0, num_slots, BLOCK):
        slots = start + offsets
        # What is not a slot counts for an expert that does not exist.
        chosen = tl.load(ids + slots, mask=slots < num_slots, other=EXPERT_BLOCK).to(tl.int32)
        counts += tl.histogram(chosen, 2 * EXPERT_BLOCK)
        mine = chosen == expert
        ranks = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places + ranks, slots, mask=mine & (ranks < capacity))
        count += tl.sum(mine.to(tl.int32), 0)
    needed = tl.where(experts < EXPERT_BLOCK, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.sum(tl.where(experts < expert, needed, 0), 0)
    number = tl.arange(0, TILE_BLOCK)
    here = number * BLOCK_M < count
    spots = tiles + (before + number) * 4
    tl.store(spots, number * 0 + expert, mask=here)
    tl.store(spots + 1, number * BLOCK_M, mask=here)
    tl.store(spots + 2, number * 0 + tl.minimum(count, capacity), mask=here)
    if expert == 0:
        _end_list(tiles, tl.sum(needed, 0), max_tiles, TILE_BLOCK)
