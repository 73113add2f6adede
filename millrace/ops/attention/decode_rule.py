"""How decode attention is cut into programs: tile, warps, stages and KV splits, by the number of streams.

A stream is the keys and values of one row and one KV head. The limits were measured on one kind of GPU
(`ops/tuning/<device>/decode_attention.json`) and scale with the number of multiprocessors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from millrace.ops.kv.cache import CacheFormat
from millrace.ops.tuning.load import num_multiprocessors, rule_table

if TYPE_CHECKING:
    from millrace.ops.triton.attention.prefill import DecodeTuning, HeadShape

SPLIT_CELLS = 2048
"""Splits of all rows and KV heads together that the split workspace has room for."""
MAX_SPLITS = 16
"""Most splits of a row where there are very few streams."""
SHARED_UNIT = 128
"""Shared prefixes are used in whole tiles of this many tokens."""
ANY_STREAMS = 1 << 30

Tile = tuple[int, int, int]
"""Keys in a tile, warps, stages."""
ByStreams = tuple[tuple[int, tuple[int, ...]], ...]
"""(max streams, values), ascending; the last has no upper limit."""


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """The measured limits, in streams of one device. The data file says what they mean."""

    very_few_streams: int
    few_streams: int
    very_few_programs: Mapping[CacheFormat, int]
    few_programs: int
    list_from: Mapping[CacheFormat, int]
    listed_parts: int
    wide_max_streams: int
    splits: Mapping[CacheFormat, ByStreams]
    """(max splits of a row, min keys of a split)"""
    tiles: Mapping[CacheFormat, ByStreams]


@functools.cache
def decode_table(device: torch.device) -> DecodeTable:
    found = rule_table(device, "decode_attention")
    here, there = num_multiprocessors(device), found["multiprocessors"]

    def scaled(limit: int | None) -> int:
        return ANY_STREAMS if limit is None else limit * here // there

    def by_streams(columns: dict[CacheFormat, list[Any]]) -> dict[CacheFormat, ByStreams]:
        return {held: tuple((scaled(most), tuple(rest)) for most, *rest in rows) for held, rows in columns.items()}

    return DecodeTable(
        very_few_streams=scaled(found["very_few_streams"]),
        few_streams=scaled(found["few_streams"]),
        very_few_programs={held: scaled(programs) for held, programs in found["very_few_programs"].items()},
        few_programs=scaled(found["few_programs"]),
        list_from={held: scaled(streams) for held, streams in found["list_from"].items()},
        listed_parts=found["listed_parts"],
        wide_max_streams=scaled(found["wide_max_streams"]),
        splits=by_streams(found["splits"]),
        tiles=by_streams(found["tiles"]),
    )


def takes_list(streams: int, held: CacheFormat, device: torch.device) -> bool:
    """True if decode rows are taken from a list, longest first."""
    return streams > decode_table(device).list_from[held]


def decode_tuning(
    shape: HeadShape, num_rows: int, dtype: torch.dtype, device: torch.device, held: CacheFormat, listed: bool
) -> DecodeTuning:
    from millrace.ops.triton.attention.prefill import DecodeTuning

    table, streams = decode_table(device), num_rows * shape.num_kv_heads
    splits, min_keys = (table.listed_parts, 1) if listed else _splits(table, streams, held)
    swap = False
    if shape.head_dim > 128 or dtype == torch.float32:
        tile, warps, stages = 32, 2, 2
    elif held == "plain" and _takes_wide_unit(table, shape, streams) and _has_wide_unit(device):
        tile, warps, stages, swap = 64, 4, 3, True
    else:
        tile, warps, stages = _by_streams(table.tiles[held], streams)
    if shape.group > 16:  # several tiles of query heads: more registers than one warp has
        warps = 4 if shape.group <= 32 else 8
    return DecodeTuning(tile, splits, max(1, min_keys // tile), warps, stages, swap)


def _takes_wide_unit(table: DecodeTable, shape: HeadShape, streams: int) -> bool:
    is_within = table.few_streams < streams <= table.wide_max_streams
    return is_within and shape.head_dim > 64 and shape.group <= 16


def _splits(table: DecodeTable, streams: int, held: CacheFormat) -> tuple[int, int]:
    """(max splits of a row, min keys of a split) where all rows are split alike.

    Few streams are split to fill the GPU at all; many only so that long rows do not run on alone at the end."""
    if streams <= table.very_few_streams:
        return max(1, min(MAX_SPLITS, table.very_few_programs[held] // max(streams, 1))), 64
    if streams <= table.few_streams:
        return max(1, table.few_programs // streams), 96
    splits, min_keys = _by_streams(table.splits[held], streams)
    return min(splits, max(1, SPLIT_CELLS // streams)), min_keys


def _by_streams(rows: ByStreams, streams: int) -> Any:
    return next(values for most, values in rows if streams <= most)


@functools.cache
def _has_wide_unit(device: torch.device) -> bool:
    """True on Hopper, whose warpgroup instruction takes both operands from shared memory, and in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
