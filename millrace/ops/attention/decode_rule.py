"""How the attention of single queries is cut: tiles, warps and splits by the number of streams of keys.

A stream is the keys and values of one row and KV head. Sizes were measured on an H200, whose multiprocessors SMS
counts, over rows of 576 tokens and over rows of 100 to 1,500 (docs/performance.md).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from millrace.ops.kv.cache import CacheFormat

if TYPE_CHECKING:
    from millrace.ops.triton.attention.prompt import DecodeTuning, HeadShape

VERY_FEW, FEW, SMS = 32, 96, 132
"""Numbers of streams between which other sizes of tiles and splits were measured to be best; and the multiprocessors
of the GPU that they were measured on."""
PROGRAMS_WANTED = 320
"""Programs that a large GPU needs to be filled, where each has a few tiles of keys alone."""
LISTED_PARTS = 8
"""The most parts of a row in a list."""

Tile = tuple[int, int, int]
"""Keys in a tile, warps, stages."""
LIST_FROM: dict[CacheFormat, int] = {"plain": FEW, "packed": 3 * SMS // 2, "eight": 3 * SMS}
"""Streams beyond which rows are best taken from a list. Fewer are all split, so that the chip is filled at all: more of
them where a tile is more work."""
MANY_PACKED: Tile = (64, 2, 3)
PACKED_TILES: tuple[tuple[int, Tile], ...] = (
    (VERY_FEW, MANY_PACKED),
    (LIST_FROM["packed"], (32, 1, 3)),
    (768, (64, 2, 4)),
    (1536, MANY_PACKED),
    (1792, (32, 1, 3)),
)
"""(most streams, their tile) over a packed cache. Four or two programs of 64 keys in three or four stages fit a
multiprocessor, and seven of 32: best is what leaves the last round of programs fullest. Up to 768 streams, programs are
also so large that the next product has no room beside two of them, where it would hold them up."""


def takes_list(streams: int, held: CacheFormat) -> bool:
    return streams > LIST_FROM[held]


def decode_tuning(
    shape: HeadShape, num_rows: int, dtype: torch.dtype, device: torch.device, held: CacheFormat, listed: bool
) -> DecodeTuning:
    from millrace.ops.triton.attention.prompt import DecodeTuning

    streams = num_rows * shape.num_kv_heads
    splits, least_keys = (LISTED_PARTS, 1) if listed else _splits(streams, held)
    swap = False
    if shape.head_dim > 128 or dtype == torch.float32:
        tile, warps, stages = 32, 2, 2
    elif held == "plain" and _takes_wide_unit(shape, streams) and _has_wide_unit(device):
        # Two programs to a multiprocessor, each with as many tiles under way as it has room for.
        tile, warps, stages, swap = 64, 4, 3, True
    else:
        tile, warps, stages = _tile(streams, held)
    if shape.group > 16:  # several tiles of query heads: more than one warp's registers hold
        warps = 4 if shape.group <= 32 else 8
    return DecodeTuning(tile, splits, max(1, least_keys // tile), warps, stages, swap)


def _takes_wide_unit(shape: HeadShape, streams: int) -> bool:
    return FEW < streams <= 4 * SMS and shape.head_dim > 64 and shape.group <= 16


def _splits(streams: int, held: CacheFormat) -> tuple[int, int]:
    """(most splits of a row, keys below which none is made) where all rows are split alike.

    A join of splits costs as much as some hundred keys. Few streams are split so that the chip is filled at all, many
    only so that long rows do not keep it waiting at the end."""
    if streams <= VERY_FEW:
        wanted = PROGRAMS_WANTED * 2 // 5 if held == "packed" else PROGRAMS_WANTED * 3 // 5
        return max(1, min(16, wanted // max(streams, 1))), 64
    if streams <= FEW:
        return max(1, PROGRAMS_WANTED // streams), 96
    if held == "packed":
        return (8, 192) if streams <= LIST_FROM[held] else (1, 2048)
    if streams <= 3 * SMS:
        return (4, 384) if held == "eight" else (2, 640)
    return 2 if streams <= 4 * SMS else 1, 2048


def _tile(streams: int, held: CacheFormat) -> Tile:
    """Three programs with tiles of 64 over a full cache fit a multiprocessor, and four with tiles of 32: what fills it
    better is better."""
    if held == "packed":
        return next((tile for most, tile in PACKED_TILES if streams <= most), MANY_PACKED)
    if held == "eight":
        return 64, 2, 4 if VERY_FEW < streams <= FEW else 3
    if VERY_FEW < streams <= FEW:
        return 32, 1, 3
    if 3 * SMS // 2 < streams <= 2 * SMS or 3 * SMS < streams <= 4 * SMS:
        return 32, 1, 4
    return 64, 2, 2 if 4 * SMS < streams <= 8 * SMS else 3


@functools.cache
def _has_wide_unit(device: torch.device) -> bool:
    """Hopper's matrix unit, which takes both operands from shared memory. The interpreter counts as one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
