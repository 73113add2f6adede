"""Both matrix products of a mixture of experts in one launch: no idle time between them.

Programs of the gated product come first. A program of the down product depends only on those of its own expert, which
started long before; it polls a counter until they are done. Programs start in the order of their ids, so those it waits
for are already running.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.dependent_launch import wait_for_previous_kernel
from millrace.ops.triton.moe.kernels import find_tile, prefetch, tile_product, weight_starts


@triton.jit
def _wait_until(counter, enough, TRIES: tl.constexpr):
    """Wait until the counter reaches `enough` and the writes before it are visible. Gives up after TRIES polls, each
    most of a microsecond: a wrong result is better than a hung GPU."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    tries = 1
    while (seen < enough) & (tries < TRIES):
        seen = tl.atomic_add(counter, 0, sem="acquire")
        tries += 1


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def joint_kernel(
    x,
    up_weights,
    down_weights,
    activated,
    out,
    counts,
    finished,
    table,
    num_slots,
    capacity,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UP_N: tl.constexpr,
    UP_K: tl.constexpr,
    DOWN_N: tl.constexpr,
    DOWN_K: tl.constexpr,
    UP_SWAP: tl.constexpr,
    DOWN_SWAP: tl.constexpr,
    AHEAD: tl.constexpr,
    TRIES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """activated[slot] = act(gate) · up of x[slot // TOP_K], then out[slot] = activated[slot] · down; one tile per
    program.

    `finished` [EXPERTS], initially zero, counts the finished programs of the gated product per expert.
    AHEAD: bytes of every down weight row to prefetch before the wait.
    """
    UP_TILES: tl.constexpr = (INNER + UP_N - 1) // UP_N
    DOWN_TILES: tl.constexpr = (HIDDEN + DOWN_N - 1) // DOWN_N
    wait_for_previous_kernel(EARLY)
    experts = tl.arange(0, EXPERT_BLOCK)
    sizes = tl.minimum(tl.load(counts + experts, mask=experts < EXPERTS, other=0), capacity)
    num_ups = tl.sum((sizes + BLOCK_M - 1) // BLOCK_M, 0) * UP_TILES
    program = tl.program_id(0)
    is_up = program < num_ups
    place = tl.where(is_up, program, program - num_ups)
    tile = tl.where(is_up, place // UP_TILES, place // DOWN_TILES)
    expert, first, count = find_tile(sizes, tile, EXPERT_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    wanted = first + tl.arange(0, BLOCK_M)
    real = wanted < count
    slots = tl.load(table + expert.to(tl.int64) * capacity + wanted, mask=real, other=0)
    # If a step was aborted before the counts were reset, the table has gaps: clamp, to stay inside the buffers.
    slots = tl.minimum(tl.maximum(slots, 0), num_slots - 1)
    if is_up:
        column = (place % UP_TILES) * UP_N
        up_starts = weight_starts(up_weights, expert, column, INNER, HIDDEN, UP_N, 2)
        tile_product(
            x, up_starts, activated, slots, real, column, TOP_K, INNER, HIDDEN, 2, KIND,
            BLOCK_M, UP_N, UP_K, UP_SWAP, "",
        )  # fmt: skip
        # All warps must have stored before one of them increments the counter, whose release makes the stores visible.
        tl.debug_barrier()
        tl.atomic_add(finished + expert, 1, sem="release")
    else:
        column = (place % DOWN_TILES) * DOWN_N
        down_starts = weight_starts(down_weights, expert, column, HIDDEN, INNER, DOWN_N, 1)
        if AHEAD > 0:
            prefetch(down_starts, AHEAD)
        _wait_until(finished + expert, (count + BLOCK_M - 1) // BLOCK_M * UP_TILES, TRIES)
        tl.debug_barrier()
        tile_product(
            activated, down_starts, out, slots, real, column, 1, HIDDEN, INNER, 1, KIND,
            BLOCK_M, DOWN_N, DOWN_K, DOWN_SWAP, "",
        )  # fmt: skip
