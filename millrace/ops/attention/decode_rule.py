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

from millrace.ops.base.capability import capability
from millrace.ops.kv.cache import CacheFormat
from millrace.ops.tuning.load import num_multiprocessors, rule_table

if TYPE_CHECKING:
    from millrace.ops.triton.attention.prefill import AttentionShape, DecodeTuning

SPLIT_CELLS = 2048
"""Capacity of the split workspace: splits summed over all rows and KV heads."""
MAX_ENTRIES = 128
"""Maximum entries of a list that the device makes."""
SHARED_UNIT = 128
"""Shared prefixes are used in whole tiles of this many tokens."""
LIST_COLUMNS = 6
"""Columns of the list of decode rows: token, row of the block tables, length, part, number of parts, and the first
workspace cell of the parts. An entry of length 0 is empty."""
MAX_LISTED_PARTS = 8
"""Maximum number of parts of one row in the list."""
ANY_STREAMS = 1 << 30

Tile = tuple[int, int, int]
"""Keys in a tile, warps, stages."""
ByStreams = tuple[tuple[int, tuple[int, ...]], ...]
"""(max streams, values), ascending; the last has no upper limit."""


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """The measured limits, scaled to one device. The data file explains each field."""

    list_from: Mapping[CacheFormat, int]
    wide_streams: tuple[int, int]
    few: Mapping[CacheFormat, ByStreams]
    """(programs, keys in a tile, warps, stages)"""
    few_with_drafts: ByStreams
    """The same, and max queries of a program"""
    splits: Mapping[CacheFormat, ByStreams]
    """(max splits of a row, min keys of a split)"""
    tiles: Mapping[CacheFormat, ByStreams]


@functools.cache
def decode_table(device: torch.device) -> DecodeTable:
    found = rule_table(device, "decode_attention")
    multiprocessors, measured_multiprocessors = num_multiprocessors(device), found["multiprocessors"]

    def scaled(limit: int | None) -> int:
        return ANY_STREAMS if limit is None else limit * multiprocessors // measured_multiprocessors

    def by_streams(columns: dict[CacheFormat, list[Any]]) -> dict[CacheFormat, ByStreams]:
        return {key: tuple((scaled(limit), tuple(rest)) for limit, *rest in rows) for key, rows in columns.items()}

    def scaled_few(rows: list[list[int]]) -> ByStreams:
        return tuple((scaled(limit), (scaled(programs), *tile)) for limit, programs, *tile in rows)

    few: dict[CacheFormat, ByStreams] = {key: scaled_few(rows) for key, rows in found["few"].items()}
    return DecodeTable(
        list_from={key: scaled(streams) for key, streams in found["list_from"].items()},
        wide_streams=(scaled(found["wide_streams"][0]), scaled(found["wide_streams"][1])),
        few=few,
        few_with_drafts=scaled_few(found["few_with_drafts"]),
        splits=by_streams(found["splits"]),
        tiles=by_streams(found["tiles"]),
    )


@dataclass(frozen=True, slots=True)
class FewRows:
    """How few rows are computed: cut into equal parts by the device, see `ops/triton/attention/row_parts.py`."""

    entries: int
    """Entries of the list of parts: as many as fill the GPU once."""
    tile: Tile
    own_queries: int
    """Maximum queries of a row in one program."""


def few_rows(
    shape: AttentionShape, num_rows: int, device: torch.device, cache_format: CacheFormat, queries_per_row: int = 1
) -> FewRows | None:
    """None if the rows are not few."""
    table, streams = decode_table(device), num_rows * shape.num_kv_heads
    limits = table.few[cache_format] if queries_per_row == 1 else table.few_with_drafts
    for max_streams, (programs, tile, warps, stages, *own) in limits:
        own_queries = own[0] if own else 1
        turns = -(-queries_per_row // shape.queries_per_program(queries_per_row, own_queries))
        entries = min(programs // (shape.num_kv_heads * turns), MAX_ENTRIES)
        if streams <= max_streams and num_rows <= entries:
            return FewRows(entries, (tile, warps, stages), own_queries)
    return None


def takes_list(streams: int, cache_format: CacheFormat, device: torch.device) -> bool:
    """True if the kernel takes decode rows from a list sorted by length, longest first."""
    return streams > decode_table(device).list_from[cache_format]


def decode_tuning(
    shape: AttentionShape,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    cache_format: CacheFormat,
    listed: bool,
    queries_per_row: int = 1,
) -> DecodeTuning:
    from millrace.ops.triton.attention.prefill import DecodeTuning

    table, streams = decode_table(device), num_rows * shape.num_kv_heads
    few = few_rows(shape, num_rows, device, cache_format, queries_per_row) if listed else None
    own_queries = shape.queries_per_program(queries_per_row, few.own_queries if few else queries_per_row)
    turns = -(-queries_per_row // own_queries)
    splits, min_keys = (MAX_LISTED_PARTS, 1) if listed else _splits(table, streams, cache_format, turns)
    if few is not None:
        splits = 2 * few.entries // num_rows
    swap = False
    if shape.head_dim > 128 or dtype == torch.float32:
        tile, warps, stages = 32, 2, 2
    elif few is not None:
        tile, warps, stages = few.tile
    elif cache_format == "plain" and _is_wgmma_faster(table, shape, streams) and _has_wgmma(device):
        tile, warps, stages, swap = 64, 4, 3, True
    else:
        tile, warps, stages = _by_streams(table.tiles[cache_format], streams)
    if shape.group > 16:  # several tiles of query heads: more registers than one warp has
        warps = 4 if shape.group <= 32 else 8
    return DecodeTuning(tile, splits, max(1, min_keys // tile), warps, stages, swap, own_queries)


def _is_wgmma_faster(table: DecodeTable, shape: AttentionShape, streams: int) -> bool:
    is_within = table.wide_streams[0] < streams <= table.wide_streams[1]
    return is_within and shape.head_dim > 64 and shape.group <= 16


def _splits(table: DecodeTable, streams: int, cache_format: CacheFormat, turns: int) -> tuple[int, int]:
    """(max splits of a row, min keys of a split) if all rows have the same number of splits: only to keep long rows
    from running alone at the end."""
    splits, min_keys = _by_streams(table.splits[cache_format], streams)
    return min(splits, max(1, SPLIT_CELLS // (streams * turns))), min_keys


def _by_streams(rows: ByStreams, streams: int) -> Any:
    return next(values for max_streams, values in rows if streams <= max_streams)


@functools.cache
def _has_wgmma(device: torch.device) -> bool:
    """True on Hopper, whose warpgroup MMA reads both operands from shared memory, and in Triton's interpreter."""
    return device.type != "cuda" or capability(device)[0] == 9
