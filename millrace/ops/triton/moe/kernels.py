"""Kernels of the mixture of experts; `experts.py` launches them. A *slot* is one choice of one token.

Slot s belongs to token s // top_k. Everything between the two matrix products is indexed by slot, so nothing is
permuted: programs gather the rows of their expert and scatter the results back to the same slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millrace.ops.triton.dependent_launch import wait_for_previous_kernel


@triton.jit
def activate(x, KIND: tl.constexpr):
    """KIND: 0 silu, 1 gelu by tanh, 2 gelu."""
    if KIND == 0:
        y = x * tl.sigmoid(x)
    elif KIND == 1:
        # 0.5 · (1 + tanh(u)) is sigmoid(2 u).
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def find_tile(counts, tile, EXPERT_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, rows of the expert) of tile number `tile`; past the last tile the expert is EXPERT_BLOCK."""
    experts = tl.arange(0, EXPERT_BLOCK)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    here = experts == expert
    count = tl.sum(tl.where(here, counts, 0), 0)
    first = (tile - tl.sum(tl.where(here, ends - tiles, 0), 0)) * BLOCK_M
    return expert, first, count


@triton.jit
def find_rows(counts, table, capacity, tile, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, slots [BLOCK_M], mask of real ones) of a tile; past the last tile the expert is EXPERTS or more."""
    experts = tl.arange(0, EXPERT_BLOCK)
    sizes = tl.minimum(tl.load(counts + experts, mask=experts < EXPERTS, other=0), capacity)
    expert, first, count = find_tile(sizes, tile, EXPERT_BLOCK, BLOCK_M)
    wanted = first + tl.arange(0, BLOCK_M)
    real = wanted < count
    rows = tl.load(table + expert.to(tl.int64) * capacity + wanted, mask=real, other=0)
    return expert, rows, real


@triton.jit
def _product(
    a_rows,
    b_rows,
    real,
    ks,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVICT: tl.constexpr,
):
    """float32 [BLOCK_M, WIDTH]: product of the rows at these pointers; rows of `a` that are not real count as zeros."""
    if SWAP:
        acc = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for k in range(0, K, BLOCK_K):
        # Weights first: the addresses of the rows of `a` are known a little later.
        if K % BLOCK_K == 0:
            b = tl.load(b_rows + k, eviction_policy=EVICT)
            a = tl.load(a_rows + k, mask=real[:, None], other=0.0)
        else:
            inside = (k + ks < K)[None, :]
            b = tl.load(b_rows + k, mask=inside, other=0.0, eviction_policy=EVICT)
            a = tl.load(a_rows + k, mask=real[:, None] & inside, other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def prefetch(rows, BYTES: tl.constexpr):
    """Prefetch the first BYTES of the weight rows at these pointers into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows, tl.full(rows.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_kept(rows, BYTES: tl.constexpr):
    """As prefetch, with the evict-last policy: they stay in L2 until they are read."""
    tl.inline_asm_elementwise(
        "{ .reg .b64 kept; createpolicy.fractional.L2::evict_last.b64 kept, 1.0;"
        " cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, kept; mov.u32 $0, 0; }",
        "=r,l,r",
        [rows, tl.full(rows.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def weight_starts(
    w, expert, first_column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr
):
    """Pointers to the weight rows of BLOCK_N columns. With two halves (gate rows before up rows in memory), row 2 i of
    the tile is gate row i and row 2 i + 1 is up row i: neighbours in one thread's registers."""
    places = tl.arange(0, HALVES * BLOCK_N)
    index = tl.minimum(first_column + places // HALVES, N - 1) + (places % HALVES) * N
    return w + expert.to(tl.int64) * (HALVES * N * K) + index * K


@triton.jit
def tile_product(
    x,
    b_starts,
    out,
    slots,
    real,
    first_column,
    SLOTS_PER_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVICT: tl.constexpr,
):
    """out[slot] = x[slot // SLOTS_PER_ROW] · weight rows, for the real slots; with two halves, act(gate) · up."""
    ks = tl.arange(0, BLOCK_K)
    a_rows = x + (slots // SLOTS_PER_ROW).to(tl.int64)[:, None] * K + ks[None, :]
    b_rows = b_starts[:, None] + ks[None, :]
    acc = _product(a_rows, b_rows, real, ks, K, BLOCK_M, HALVES * BLOCK_N, BLOCK_K, SWAP, EVICT)
    if HALVES == 2:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        result = activate(gate, KIND) * up
    else:
        result = acc
    columns = first_column + tl.arange(0, BLOCK_N)
    places_out = out + slots.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places_out, result.to(out.dtype.element_ty), mask=real[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def grouped_kernel(
    x,
    w,
    out,
    counts,
    table,
    num_slots,
    capacity,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVICT: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Up to BLOCK_M slots of one expert, BLOCK_N columns of out[slot] = x[slot // SLOTS_PER_ROW] · w[expert]ᵀ.

    GATED: w is [E, 2 N, K], gate rows before up rows, and out is act(gate) · up; otherwise w is [E, N, K].
    AHEAD: bytes of every weight row to prefetch first.
    EARLY: the down product follows the gated one, which started after the grouping had ended, so it may find its rows
    and prefetch weights before it waits for its input.
    SWAP: compute the transposed product, so that weight rows, not the few tokens, fill the matrix instruction.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // N_TILES
    first_column = (tl.program_id(0) % N_TILES) * BLOCK_N
    if GATED:
        wait_for_previous_kernel(EARLY)
    expert, slots, real = find_rows(counts, table, capacity, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    # If a step was aborted before the counts were reset, the table has gaps: clamp, to stay inside the buffers.
    slots = tl.minimum(tl.maximum(slots, 0), num_slots - 1)
    HALVES: tl.constexpr = 2 if GATED else 1
    b_starts = weight_starts(w, expert, first_column, N, K, BLOCK_N, HALVES)
    if AHEAD > 0:
        prefetch(b_starts, AHEAD)
    if not GATED:
        wait_for_previous_kernel(EARLY)
    tile_product(
        x, b_starts, out, slots, real, first_column, SLOTS_PER_ROW, N, K, HALVES, KIND,
        BLOCK_M, BLOCK_N, BLOCK_K, SWAP, EVICT,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    outputs, weights, out, counts, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[token] = Σ weight · outputs[slot] over the token's slots, added in float32 in the order of its choices.

    EXPERTS: 0, or the number of counts to reset for the next step; the kernels that read them have ended.
    """
    wait_for_previous_kernel(EARLY)
    if EXPERTS > 0:
        experts = tl.arange(0, EXPERT_BLOCK)
        # Only the first program resets them.
        share = tl.where(tl.program_id(0) + tl.program_id(1) == 0, EXPERTS, 0)
        tl.store(counts + experts, experts * 0, mask=experts < share)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        part = tl.load(outputs + slot * H + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + slot) * part
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def vector_gate_up_kernel(
    x,
    w,
    out,
    ids,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of one slot's act(gate) · up, by vector products: nothing is grouped."""
    slot = tl.program_id(0)
    expert = tl.load(ids + slot).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    gate_rows = w + expert * (2 * N * K) + tl.minimum(columns, N - 1)[:, None] * K + ks[None, :]
    token = x + (slot // TOP_K).to(tl.int64) * K + ks
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    UNROLLED: tl.constexpr = STEPS if STEPS < 4 else 4
    for start in range(0, K, UNROLLED * BLOCK_K):
        for step in tl.static_range(UNROLLED):
            k = start + step * BLOCK_K
            inside = k + ks < K
            values = tl.load(token + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate_part = tl.load(gate_rows + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            up_part = tl.load(gate_rows + N * K + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            gate += gate_part.to(tl.float32) * values
            up += up_part.to(tl.float32) * values
    result = activate(tl.sum(gate, 1), KIND) * tl.sum(up, 1)
    tl.store(out + slot.to(tl.int64) * N + columns, result.to(out.dtype.element_ty), mask=columns < N)


@triton.jit
def vector_down_kernel(
    hidden,
    w,
    out,
    weights,
    ids,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of one token's result: all its experts' down products, weighted and added."""
    # Neighbouring programs have the same columns of other tokens: an expert chosen by two of them is read once.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    choices = tl.arange(0, CHOICES)
    ks = tl.arange(0, BLOCK_K)
    slots = token * TOP_K + choices
    real = choices < TOP_K
    experts = tl.load(ids + slots, mask=real, other=0).to(tl.int64)
    shares = tl.load(weights + slots, mask=real, other=0.0)
    rows = w + experts[:, None, None] * (N * K) + tl.minimum(columns, N - 1)[None, :, None] * K + ks[None, None, :]
    inputs = hidden + slots[:, None] * K + ks[None, :]
    total = tl.zeros([CHOICES, BLOCK_N, BLOCK_K], tl.float32)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    UNROLLED: tl.constexpr = STEPS if STEPS < 4 else 4
    for start in range(0, K, UNROLLED * BLOCK_K):
        for step in tl.static_range(UNROLLED):
            k = start + step * BLOCK_K
            inside = real[:, None] & (k + ks < K)[None, :]
            part = tl.load(rows + k, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first")
            values = tl.load(inputs + k, mask=inside, other=0.0).to(tl.float32)
            total += part.to(tl.float32) * values[:, None, :]
    result = tl.sum(tl.sum(total, 2) * shares[:, None], 0)
    tl.store(out + token * N + columns, result.to(out.dtype.element_ty), mask=columns < N)
