"""Which kernel and tiles a product with packed codes takes, by its size. Measured with the sizes of an 8B model on an
H200 (2026-11): the rules below are within 5% of the best of about 30 candidates for each of them."""

from __future__ import annotations

import triton

from millrace.ops.triton.grouped.few_rows import MAX_ROWS, FewTiles
from millrace.ops.triton.grouped.layout import OUTPUTS, PackedCodes
from millrace.ops.triton.grouped.many_rows import BLOCK_PAIR, ManyTiles

WIDE = 16384
"""From this many outputs on, one tile of each per program fills the GPU."""
DEEP = 8192
"""From this many inputs on, eight warps share them."""
SPLIT_TILES = 80
"""Sums are split if a product has no more tiles than this."""
MAX_COUNTERS = SPLIT_TILES


def few_tiles(rows: int, weight: PackedCodes) -> FewTiles | None:
    """Tiles for few rows; None if they are too many."""
    wide = weight.outputs >= WIDE
    if rows > (16 if wide else MAX_ROWS):
        return None
    pairs = 2 if weight.outputs % (2 * OUTPUTS) == 0 else 1
    if rows > 16:
        return FewTiles(warps=4, ahead=2, tiles=pairs)
    if weight.inputs >= DEEP:
        return FewTiles(warps=8, ahead=4 if rows <= 8 else 2, tiles=1)
    if not wide:
        return FewTiles(warps=4, ahead=4, tiles=1)
    return FewTiles(warps=4, ahead=4, tiles=pairs) if rows <= 8 else FewTiles(warps=2, ahead=2, tiles=pairs)


def many_tiles(rows: int, weight: PackedCodes) -> ManyTiles | None:
    """Tiles for many rows on Hopper; None if the weight does not fit."""
    if weight.inputs % BLOCK_PAIR:
        return None
    side = min(256, max(16, triton.next_power_of_2(rows)))
    stages = 4 if side > 64 else 6
    if weight.outputs >= WIDE or rows >= 1024:
        return ManyTiles(side, 128, stages)
    tiles = ManyTiles(side, 64, stages)
    if tiles.count(rows, weight.outputs) <= SPLIT_TILES and weight.inputs >= 2048:
        return ManyTiles(side, 64, stages, split=2)
    return tiles
