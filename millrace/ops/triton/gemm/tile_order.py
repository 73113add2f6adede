"""Which tile of a product a program has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_places(M, N, BM: tl.constexpr, BN: tl.constexpr, TOGETHER: tl.constexpr):
    """Rows and outputs of the tile of this program. TOGETHER tiles of rows follow each other, so that weights stay in
    the L2 cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (TOGETHER * tiles_n) * TOGETHER
    size = tl.minimum(tiles_m - first, TOGETHER)
    within = pid % (TOGETHER * tiles_n)
    return (first + within % size) * BM + tl.arange(0, BM), within // size * BN + tl.arange(0, BN)


@triton.jit
def operand_rows(ptr, rows, count, K):
    """Pointers to rows [B, 1] of K items; past the end to any row, whose products are not stored."""
    return ptr + tl.minimum(rows, count - 1).to(tl.int64)[:, None] * K


@triton.jit
def operand_tile(rows, inputs, K, WHOLE: tl.constexpr):
    """Items of the rows; zeros past K, unless the tiles are WHOLE."""
    if WHOLE:
        return tl.load(rows + inputs[None, :])
    else:
        return tl.load(rows + inputs[None, :], mask=(inputs < K)[None, :], other=0.0)
