"""add_lora: two kernels, x Aᵀ and its product with B. Their grids depend on the number of tokens alone, and every token
reads its slot, ranks and addresses on the device, so a captured step serves any mix of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS, MAX_RANK = 3, 256
"""Of a linear's outputs (queries, keys, values); of an adapter."""
BLOCK_R, BLOCK_K, BLOCK_N = 16, 128, 128


@triton.jit
def _shrink(
    x, x_stride, slots, a_table, ranks, scales, low, in_features,
    PARTS: tl.constexpr, MAX_R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """low [T, PARTS, MAX_R] = scale · (x Aᵀ), in float32."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot * PARTS + part)
    first_row = rank * 0
    for earlier in range(part):
        first_row += tl.load(ranks + slot * PARTS + earlier)
    scale = tl.load(scales + slot * PARTS + part)
    a = tl.load(a_table + slot).to(tl.pointer_type(x.dtype.element_ty)) + first_row.to(tl.int64) * in_features
    for r in range(0, rank, BLOCK_R):
        rows, total = r + tl.arange(0, BLOCK_R), tl.zeros((BLOCK_R,), tl.float32)
        for k in range(0, in_features, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            is_input = columns < in_features
            mask = (rows < rank)[:, None] & is_input[None, :]
            own = tl.load(x + token * x_stride + columns, mask=is_input, other=0.0).to(tl.float32)
            tile = tl.load(a + rows[:, None] * in_features + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(tile * own[None, :], axis=1)
        tl.store(low + (token * PARTS + part) * MAX_R + rows, total * scale, mask=rows < rank)


@triton.jit
def _expand(
    low, out, out_stride, slots, b_table, ranks, size_0, size_1, size_2,
    PARTS: tl.constexpr, MAX_R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out += low B, rounded once."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks_0, blocks_1 = tl.cdiv(size_0, BLOCK_N), tl.cdiv(size_1, BLOCK_N)
    part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot * PARTS + part)
    if rank > 0:
        rank_0, rank_1 = tl.load(ranks + slot * PARTS), tl.load(ranks + slot * PARTS + 1)
        before_1, before_2 = rank_0.to(tl.int64) * size_0, rank_1.to(tl.int64) * size_1
        skipped = tl.where(part > 0, before_1, 0) + tl.where(part > 1, before_2, 0)
        size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
        first = tl.where(part > 0, size_0, 0) + tl.where(part > 1, size_1, 0)
        local = block - tl.where(part > 0, blocks_0, 0) - tl.where(part > 1, blocks_1, 0)
        columns = local * BLOCK_N + tl.arange(0, BLOCK_N)
        b = tl.load(b_table + slot).to(tl.pointer_type(out.dtype.element_ty)) + skipped
        is_output = columns < size
        total = tl.zeros((BLOCK_N,), tl.float32)
        for r in range(0, rank, BLOCK_R):
            rows = r + tl.arange(0, BLOCK_R)
            own = tl.load(low + (token * PARTS + part) * MAX_R + rows, mask=rows < rank, other=0.0)
            mask = (rows < rank)[:, None] & is_output[None, :]
            tile = tl.load(b + rows[:, None].to(tl.int64) * size + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(tile.to(tl.float32) * own[:, None], axis=0)
        place = out + token * out_stride + first + columns
        base = tl.load(place, mask=is_output, other=0.0).to(tl.float32)
        tl.store(place, (base + total).to(out.dtype.element_ty), mask=is_output)


def add_lora(
    x: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    in_features: int,
    sizes: Sequence[int],
    out: Tensor,
) -> None:
    """`tables`: by slot the addresses of A and of B, ranks and scales. `sizes`: outputs of each part."""
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, (a, b, ranks, scales) = x.shape[0], tables
    if not tokens:
        return
    low = torch.empty((tokens, PARTS, MAX_RANK), dtype=torch.float32, device=x.device)
    _shrink[(tokens, PARTS)](
        *(x, x.stride(0), slots, a, ranks, scales, low, in_features),
        PARTS=PARTS,
        MAX_R=MAX_RANK,
        BLOCK_R=BLOCK_R,
        BLOCK_K=BLOCK_K,
    )
    _expand[(tokens, sum(triton.cdiv(size, BLOCK_N) for size in sizes))](
        *(low, out, out.stride(0), slots, b, ranks, *sizes),
        PARTS=PARTS,
        MAX_R=MAX_RANK,
        BLOCK_R=BLOCK_R,
        BLOCK_N=BLOCK_N,
    )
