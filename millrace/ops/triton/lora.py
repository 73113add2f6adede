"""add_lora: two kernels, x Aᵀ and its product with B. Their grids depend on the number of tokens alone, and every token
reads its slot, ranks and addresses on the device, so a captured step serves any mix of adapters.

Few tokens take a program each and slice of the inputs; what one slice gives is stored, and summed in a fixed order by
the second kernel. Many tokens share programs in tiles: a tile multiplies by the matrices of each adapter that it has,
one after the other, which is one or two adapters where the tokens are those of prompts. There a kernel between the two
sums what the slices gave.

All start while the kernel before still runs (`dependent_launch.py`), and read by then what is older: slots, tables and
matrices; the first one x, which the linear has read before it; the others `out`, which the linear has written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.kernel_keys import settle_keys

PARTS, MAX_RANK = 3, 256
"""Of a linear's outputs (queries, keys, values); of an adapter."""
BLOCK_R = 16
SLICE, ROW_OUTPUTS, ROW_WARPS = 512, 1024, 4
"""Inputs and outputs that a program takes for one token; warps that it has for outputs."""
TILE, TILE_INPUTS, TILE_OUTPUTS = 32, 128, 256
"""Tokens of a tile; inputs that it multiplies at a time; outputs of one program."""
MOST_ROWS = 128
"""More tokens are multiplied in tiles."""
BUSY = 256
"""Programs that keep a GPU busy: tiles are cut along their inputs until there are so many."""
MAX_CUTS, SUMMED_AT_ONCE = 8, 64
_NO_SLOT = tl.constexpr(1 << 30)


@triton.jit
def _matrix(table, slot, TYPE: tl.constexpr):
    """Matrices begin at multiples of 16 bytes, so that neighbouring numbers are loaded together."""
    return tl.multiple_of(tl.load(table + slot).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _total_rank(ranks, slot, PARTS: tl.constexpr):
    total = tl.load(ranks + slot * PARTS)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ranks + slot * PARTS + part)
    return total


@triton.jit
def _shrink_row_block(a, own, columns, is_input, first, total, in_features, BLOCK_R: tl.constexpr):
    rows = first + tl.arange(0, BLOCK_R)
    mask = (rows < total)[:, None] & is_input[None, :]
    tile = tl.load(a + rows[:, None].to(tl.int64) * in_features + columns[None, :], mask=mask, other=0.0)
    return tl.sum(tile.to(tl.float32) * own[None, :], axis=1)


@triton.jit
def _shrink_rows(
    x, x_stride, slots, a_table, ranks, low, in_features,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """low [T, slices, WIDTH] = x Aᵀ over one slice of the inputs, in float32; the parts' ranks one after the other."""
    token, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    total = _total_rank(ranks, slot, PARTS)
    a = _matrix(a_table, slot, x.dtype.element_ty)
    columns = cut * SLICE + tl.arange(0, SLICE)
    is_input = columns < in_features
    own = tl.load(x + token * x_stride + columns, mask=is_input, other=0.0).to(tl.float32)
    sums = _shrink_row_block(a, own, columns, is_input, 0, total, in_features, BLOCK_R)
    wait_for_previous_kernel(EARLY)
    place = low + (token * tl.num_programs(1) + cut) * WIDTH
    rows = tl.arange(0, BLOCK_R)
    tl.store(place + rows, sums, mask=rows < total)
    for first in range(BLOCK_R, total, BLOCK_R):
        sums = _shrink_row_block(a, own, columns, is_input, first, total, in_features, BLOCK_R)
        tl.store(place + first + rows, sums, mask=first + rows < total)


@triton.jit
def _part_of(block, size_0, size_1, size_2, BLOCK: tl.constexpr):
    """(part, its outputs, its first output, the block's first output within it) of a block of outputs."""
    blocks_0, blocks_1 = tl.cdiv(size_0, BLOCK), tl.cdiv(size_1, BLOCK)
    part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
    first = tl.where(part > 0, size_0, 0) + tl.where(part > 1, size_1, 0)
    local = (block - tl.where(part > 0, blocks_0, 0) - tl.where(part > 1, blocks_1, 0)) * BLOCK
    return part, size, first, local


@triton.jit
def _before(ranks, slot, part, size_0, size_1, PARTS: tl.constexpr):
    """(ranks, numbers of B) of the parts before this one."""
    rank_0, rank_1 = tl.load(ranks + slot * PARTS), tl.load(ranks + slot * PARTS + 1)
    rows = tl.where(part > 0, rank_0, 0) + tl.where(part > 1, rank_1, 0)
    skipped_0, skipped_1 = rank_0.to(tl.int64) * size_0, rank_1.to(tl.int64) * size_1
    return rows, tl.where(part > 0, skipped_0, 0) + tl.where(part > 1, skipped_1, 0)


@triton.jit
def _low_rows(low, token, cuts, before, first, rank, WIDTH: tl.constexpr, CUTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sums over the slices, in their order."""
    rows, at = first + tl.arange(0, BLOCK_R), tl.arange(0, CUTS)
    mask = (at < cuts)[:, None] & (rows < rank)[None, :]
    parts = tl.load(low + (token * cuts + at)[:, None] * WIDTH + (before + rows)[None, :], mask=mask, other=0.0)
    return tl.sum(parts, axis=0)


@triton.jit
def _expand_rows(
    low, cuts, out, out_stride, slots, b_table, ranks, scales, size_0, size_1, size_2,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out += scale · low B, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    part, size, first_output, local = _part_of(tl.program_id(1), size_0, size_1, size_2, BLOCK_N)
    slot = tl.load(slots + token)
    rank, scale = tl.load(ranks + slot * PARTS + part), tl.load(scales + slot * PARTS + part)
    before, skipped = _before(ranks, slot, part, size_0, size_1, PARTS)
    b = _matrix(b_table, slot, out.dtype.element_ty) + skipped
    columns, rows = local + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    is_output = columns < size
    mask = (rows < rank)[:, None] & is_output[None, :]
    tile = tl.load(b + rows[:, None].to(tl.int64) * size + columns[None, :], mask=mask, other=0.0)
    place = out + token * out_stride + first_output + columns
    base = tl.load(place, mask=is_output, other=0.0).to(tl.float32)
    wait_for_previous_kernel(EARLY)
    if rank > 0:
        own = _low_rows(low, token, cuts, before, 0, rank, WIDTH, CUTS, BLOCK_R)
        total = tl.sum(tile.to(tl.float32) * own[:, None], axis=0)
        for first in range(BLOCK_R, rank, BLOCK_R):
            own = _low_rows(low, token, cuts, before, first, rank, WIDTH, CUTS, BLOCK_R)
            mask = (first + rows < rank)[:, None] & is_output[None, :]
            tile = tl.load(b + (first + rows)[:, None].to(tl.int64) * size + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(tile.to(tl.float32) * own[:, None], axis=0)
        tl.store(place, (base + total * scale).to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _shrink_tiles(
    x, x_stride, slots, a_table, ranks, low, num_tokens, in_features, slice_size,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `_shrink_rows`, for BLOCK_M tokens and a slice of `slice_size` inputs."""
    tokens, cut = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    own_slots = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
    slot = tl.min(tl.where(own_slots > 0, own_slots, _NO_SLOT), axis=0)
    wait_for_previous_kernel(EARLY)
    places = low + (tokens.to(tl.int64) * tl.num_programs(1) + cut) * WIDTH
    while slot < _NO_SLOT:
        is_own = own_slots == slot
        total = _total_rank(ranks, slot, PARTS)
        a = _matrix(a_table, slot, x.dtype.element_ty)
        for first in range(0, total, BLOCK_R):
            rows = first + tl.arange(0, BLOCK_R)
            sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for k in range(cut * slice_size, min((cut + 1) * slice_size, in_features), BLOCK_K):
                columns = k + tl.arange(0, BLOCK_K)
                is_input = columns < in_features
                x_tile = tl.load(
                    x + tokens[:, None].to(tl.int64) * x_stride + columns[None, :],
                    mask=is_own[:, None] & is_input[None, :], other=0.0,
                )  # fmt: skip
                a_tile = tl.load(
                    a + rows[None, :].to(tl.int64) * in_features + columns[:, None],
                    mask=(rows < total)[None, :] & is_input[:, None], other=0.0,
                )  # fmt: skip
                sums = tl.dot(x_tile, a_tile, sums, input_precision=PRECISION)
            tl.store(places[:, None] + rows[None, :], sums, mask=is_own[:, None] & (rows < total)[None, :])
        slot = tl.min(tl.where(own_slots > slot, own_slots, _NO_SLOT), axis=0)


@triton.jit
def _sum_cuts(
    low, sums, slots, ranks,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr, BLOCK_R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """sums [T, WIDTH] of low [T, CUTS, WIDTH]."""
    token = tl.program_id(0).to(tl.int64)
    total = _total_rank(ranks, tl.load(slots + token), PARTS)
    wait_for_previous_kernel(EARLY)
    for first in range(0, total, BLOCK_R):
        rows, at = first + tl.arange(0, BLOCK_R), tl.arange(0, CUTS)
        place = low + (token * CUTS + at)[:, None] * WIDTH + rows[None, :]
        parts = tl.load(place, mask=(rows < total)[None, :], other=0.0)
        tl.store(sums + token * WIDTH + rows, tl.sum(parts, axis=0), mask=rows < total)


@triton.jit
def _expand_tiles(
    low, out, out_stride, slots, b_table, ranks, scales, num_tokens, size_0, size_1, size_2,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `_expand_rows`, for BLOCK_M tokens and low [T, WIDTH]."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, size, first_output, local = _part_of(tl.program_id(1), size_0, size_1, size_2, BLOCK_N)
    columns = local + tl.arange(0, BLOCK_N)
    is_output = columns < size
    own_slots = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
    slot = tl.min(tl.where(own_slots > 0, own_slots, _NO_SLOT), axis=0)
    places = out + tokens[:, None].to(tl.int64) * out_stride + (first_output + columns)[None, :]
    base = tl.load(places, mask=(own_slots > 0)[:, None] & is_output[None, :], other=0.0).to(tl.float32)
    wait_for_previous_kernel(EARLY)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    changed = tokens * 0
    while slot < _NO_SLOT:
        is_own = own_slots == slot
        rank, scale = tl.load(ranks + slot * PARTS + part), tl.load(scales + slot * PARTS + part)
        before, skipped = _before(ranks, slot, part, size_0, size_1, PARTS)
        b = _matrix(b_table, slot, out.dtype.element_ty) + skipped
        changed += tl.where(is_own, rank, 0)
        for first in range(0, rank, BLOCK_R):
            rows = first + tl.arange(0, BLOCK_R)
            mask = is_own[:, None] & (rows < rank)[None, :]
            own = tl.load(low + tokens.to(tl.int64)[:, None] * WIDTH + (before + rows)[None, :], mask=mask, other=0.0)
            tile = tl.load(
                b + rows[:, None].to(tl.int64) * size + columns[None, :],
                mask=(rows < rank)[:, None] & is_output[None, :], other=0.0,
            )  # fmt: skip
            sums = tl.dot((own * scale).to(tile.dtype), tile, sums, input_precision=PRECISION)
        slot = tl.min(tl.where(own_slots > slot, own_slots, _NO_SLOT), axis=0)
    mask = (changed > 0)[:, None] & is_output[None, :]
    tl.store(places, (base + sums).to(out.dtype.element_ty), mask=mask)


settle_keys(globals())


def add_lora(
    x: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    in_features: int,
    sizes: Sequence[int],
    out: Tensor,
    most_rows: int = MOST_ROWS,
) -> None:
    """`tables`: by slot the addresses of A and of B, ranks and scales. `sizes`: outputs of each part. `most_rows`: more
    tokens are multiplied in tiles, where the order of sums depends on their number."""
    tokens = x.shape[0]
    if not tokens:
        return
    if x.stride(1) != 1:
        raise ValueError("add_lora reads inputs that are contiguous in each token")
    add = _add_by_row if tokens <= most_rows else _add_by_tile
    add(x, slots, tables, in_features, sizes, out)


def _add_by_row(
    x: Tensor, slots: Tensor, tables: tuple[Tensor, ...], in_features: int, sizes: Sequence[int], out: Tensor
) -> None:
    tokens, (a, b, ranks, scales), early = x.shape[0], tables, pdl_options(x.device)
    cuts = triton.cdiv(in_features, SLICE)
    low = torch.empty((tokens, cuts, PARTS * MAX_RANK), dtype=torch.float32, device=x.device)
    _shrink_rows[(tokens, cuts)](
        *(x, x.stride(0), slots, a, ranks, low, in_features),
        PARTS=PARTS,
        WIDTH=PARTS * MAX_RANK,
        BLOCK_R=BLOCK_R,
        SLICE=SLICE,
        **early,
    )
    _expand_rows[(tokens, sum(triton.cdiv(size, ROW_OUTPUTS) for size in sizes))](
        *(low, cuts, out, out.stride(0), slots, b, ranks, scales, *sizes),
        PARTS=PARTS,
        WIDTH=PARTS * MAX_RANK,
        CUTS=triton.next_power_of_2(cuts),
        BLOCK_R=BLOCK_R,
        BLOCK_N=ROW_OUTPUTS,
        num_warps=ROW_WARPS,
        **early,
    )


def _add_by_tile(
    x: Tensor, slots: Tensor, tables: tuple[Tensor, ...], in_features: int, sizes: Sequence[int], out: Tensor
) -> None:
    tokens, (a, b, ranks, scales), early = x.shape[0], tables, pdl_options(x.device)
    tiles = triton.cdiv(tokens, TILE)
    wanted = min(MAX_CUTS, max(1, BUSY // tiles), triton.cdiv(in_features, SLICE))
    cuts = 1 << (wanted.bit_length() - 1)
    slice_size = triton.cdiv(triton.cdiv(in_features, cuts), TILE_INPUTS) * TILE_INPUTS
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    low = torch.empty((tokens, cuts, PARTS * MAX_RANK), dtype=torch.float32, device=x.device)
    _shrink_tiles[(tiles, cuts)](
        *(x, x.stride(0), slots, a, ranks, low, tokens, in_features, slice_size),
        PARTS=PARTS,
        WIDTH=PARTS * MAX_RANK,
        BLOCK_R=BLOCK_R,
        BLOCK_M=TILE,
        BLOCK_K=TILE_INPUTS,
        PRECISION=precision,
        **early,
    )
    if cuts > 1:
        low, parts = torch.empty((tokens, PARTS * MAX_RANK), dtype=torch.float32, device=x.device), low
        _sum_cuts[(tokens,)](
            *(parts, low, slots, ranks),
            PARTS=PARTS,
            WIDTH=PARTS * MAX_RANK,
            CUTS=cuts,
            BLOCK_R=SUMMED_AT_ONCE,
            num_warps=1,
            **early,
        )
    _expand_tiles[(tiles, sum(triton.cdiv(size, TILE_OUTPUTS) for size in sizes))](
        *(low, out, out.stride(0), slots, b, ranks, scales, tokens, *sizes),
        PARTS=PARTS,
        WIDTH=PARTS * MAX_RANK,
        BLOCK_R=BLOCK_R,
        BLOCK_M=TILE,
        BLOCK_N=TILE_OUTPUTS,
        PRECISION=precision,
        **early,
    )
