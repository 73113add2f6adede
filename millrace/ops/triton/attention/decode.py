"""Paged decode attention: rows with a single query, or each with the same few (a token and its drafts).

Programs are (KV head, row, KV split), so that concurrent programs read neighbouring parts of the same blocks. Rows come
in batch order or as a list sorted by length, so that no long row starts last; in a list, a row much longer than the
others is split into several parts. Lengths and block tables were written at the start of the step, so they are read
before waiting for the previous kernel (`dependent_launch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.kv.cache import format_of
from millrace.ops.triton.attention.paged_kv import (
    TILE_VECTORS,
    TRITON_TYPES,
    AttentionShape,
    PagedRows,
    _accumulate,
    _accumulate_swapped,
    _blocks_of,
    _load_keys,
    _load_queries,
    _load_scales,
    _load_values,
    _places,
    _scales_of,
    _scores,
    _whole,
    _with_sinks,
    _zeros,
    cache_pointers,
    cache_sizes,
    is_wide,
    item_strides,
    padded_dim,
    padded_vectors,
    precision,
)
from millrace.ops.triton.dependent_launch import pdl_options

SHARED_PARTS = 4
"""Parts that a shared prefix is split into, so that few rows still fill the GPU."""
NO_WEIGHT = 1e30
"""A maximum score so large that every real score gets weight 0."""
JOINED_ITEMS = 4096
"""Partial results per warp that fit in registers and are loaded at once when splits are combined."""


@triton.jit
def _join(partial_ptr, lse_ptr, cell, active, d, VECTORS: tl.constexpr, GJ: tl.constexpr, GP: tl.constexpr,
          DP: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """[GJ, items d of DP]: splits combined, PARTS at a time, each time all loaded before the first is used. A split in
    which a query sees no key has weight 0; a query that sees none at all gets zeros."""
    g = tl.arange(0, GJ)
    top = tl.full([GJ], float("-inf"), tl.float32)
    total = tl.zeros([GJ], tl.float32)
    joined = tl.zeros([GJ, d.shape[0]], tl.float32)
    for first in range(0, active, PARTS):
        parts = first + tl.arange(0, PARTS)
        here = (parts < active)[:, None] & (g < VECTORS)[None, :]
        at = (cell + parts)[:, None] * GP + g[None, :]
        lse = tl.load(lse_ptr + at, mask=here, other=float("-inf"), cache_modifier=".cg")
        theirs = at.to(tl.int64)[:, :, None] * DP + d[None, None, :]
        partial = tl.load(partial_ptr + theirs, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
        top_now = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(top_now == float("-inf"), 0.0, top_now)
        weights = tl.math.exp2(lse - safe[None, :])
        before = tl.math.exp2(top - safe)
        total = total * before + tl.sum(weights, 0)
        joined = joined * before[:, None] + tl.sum(partial * weights[:, :, None], 0)
        top = top_now
    return joined / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["splits", "min_tiles"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, partial_ptr, lse_ptr, arrivals_ptr,
    listed_ptr, query_starts, seq_lens, table_rows, tables,
    shared_len_ptr, shared_partial_ptr, shared_lse_ptr, sinks_ptr,
    softmax_scale, q_stride, table_stride, block_stride, splits, min_tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, OWN: tl.constexpr, GP: tl.constexpr,
    GJ: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PART: tl.constexpr, BS: tl.constexpr, ITEMS: tl.constexpr,
    HEAD_ITEMS: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, LISTED: tl.constexpr, ALL_SINGLE: tl.constexpr, PARTS: tl.constexpr,
    SHARED_PARTS: tl.constexpr, NO_WEIGHT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The last split of a row and head to arrive combines all of them. PARTS: how many are combined at once. LISTED:
    rows come from a list.

    Of the QUERIES queries of a row a program has OWN; these, times the GROUP heads of a KV head, are its vectors:
    vector g is its query g // GROUP. The programs of a row's other queries run beside it and find the keys in L2. The
    last query sees all keys of the row, each one before it sees one key less."""
    TURNS: tl.constexpr = (QUERIES + OWN - 1) // OWN
    head = tl.program_id(0) // TURNS
    turn = tl.program_id(0) % TURNS
    row = tl.program_id(1)
    split = tl.program_id(2)
    first_cell = row * splits
    if LISTED:
        entry = listed_ptr + row
        entries = tl.num_programs(1)
        start = tl.load(entry)
        table_row = tl.load(entry + entries)
        last = tl.load(entry + 2 * entries)
        split = tl.load(entry + 3 * entries)
        splits = tl.load(entry + 4 * entries)
        first_cell = tl.load(entry + 5 * entries)
    else:
        table_row = tl.load(table_rows + row)
        last = tl.load(seq_lens + row)
        if ALL_SINGLE:
            start = row * QUERIES
            is_single = True
        else:
            start = tl.load(query_starts + row)
            is_single = tl.load(query_starts + row + 1) - start == QUERIES
    table = tables + table_row.to(tl.int64) * table_stride
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - (QUERIES - 1) - WINDOW, 0)
    if SHARED_PARTS > 0:
        first = tl.load(shared_len_ptr)
    first_tile = first // TILE
    tiles = tl.cdiv(last, TILE) - first_tile
    active = tl.minimum(tl.cdiv(tiles, min_tiles), splits)
    if SHARED_PARTS > 0:
        # A padding row has no keys of its own.
        active = tl.maximum(active, 1)
    per_split = tl.cdiv(tiles, tl.maximum(active, 1))
    active = tl.minimum(active, tl.cdiv(tiles, tl.maximum(per_split, 1)))
    if SHARED_PARTS > 0:
        active = tl.maximum(active, 1)
    # Programs without work need not wait for the previous kernel. Row 0 of a list, or split 0 of a row, does, so that
    # this kernel does not end before the previous one.
    if LISTED:
        is_single = split < active
        if (split >= active) & (row > 0):
            return
    else:
        is_single = is_single & (split < active)
        if (split >= active) & (split > 0):
            return
    begin = (first_tile + split * per_split) * TILE
    end = tl.minimum(begin + per_split * TILE, last)
    head_offset = head * HEAD_ITEMS
    scale_offset = _scales_of(head, KV_HEADS, BS, ITEMS, HEAD_ITEMS, FORMAT)
    # Block ids are loaded two tiles ahead: a load that depends on another of the same iteration is not pipelined.
    keys = begin + tl.arange(0, TILE)
    blocks = _blocks_of(table, keys, last, BS)
    blocks_ahead = _blocks_of(table, keys + TILE, last, BS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not is_single:
        return

    VECTORS: tl.constexpr = GROUP * OWN
    part = tl.arange(0, PART)
    q_part = tl.arange(0, DP if FORMAT == "int4" else PART)
    g = tl.arange(0, GP)
    heads = head * GROUP + g % GROUP
    queries = turn * OWN + g // GROUP
    is_query = (g < VECTORS) & (queries < QUERIES)
    tokens = start.to(tl.int64) + queries
    q_at = q_ptr + tokens * q_stride + heads * D
    limits = last - (QUERIES - 1) + queries
    # Padding heads give every key weight 0: products with zeros draw less power, which is what limits the GPU here.
    m = tl.where(is_query, float("-inf"), NO_WEIGHT)
    if SWAP:
        mine = is_query[None, :] & (part < D)[:, None]
        q = _load_queries(q_at[None, :] + part[:, None], mine, D, FORMAT)
        z = tl.zeros([TILE, GP], tl.float32)
        acc = _zeros(DP, GP, FORMAT)
    else:
        mine = is_query[:, None] & (q_part < D)[None, :]
        q = _load_queries(q_at[:, None] + q_part[None, :], mine, D, FORMAT)
        z = tl.where(is_query, 0.0, 1.0)
        acc = _zeros(GP, PART, FORMAT)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        inside = keys < last
        where = _places(blocks, keys, head_offset, block_stride, part, ITEMS, BS, WIDE)
        k_scales, v_scales = _load_scales(
            k_scales_ptr, v_scales_ptr, blocks, keys, inside, scale_offset, block_stride, BS, WIDE, FORMAT
        )
        blocks = tl.where(keys + TILE < last, blocks_ahead, 0)
        blocks_ahead = _blocks_of(table, keys + 2 * TILE, last, BS)
        k = _load_keys(k_ptr, where, part, D, DP, BS, DTYPE, FORMAT, EARLY)
        v = _load_values(v_ptr, where, inside, part, D, DP, BS, True, DTYPE, FORMAT, EARLY)
        if WINDOW > 0:
            inside = inside & (keys >= first)
        if SWAP:
            seen = inside[:, None]
            if QUERIES > 1:
                seen = _seen(keys[:, None], limits[None, :], WINDOW)
            acc, m, z = _accumulate_swapped(acc, m, z, q, k, v, seen, softmax_scale, CAP, DTYPE, PRECISION)
        else:
            s = _scores(q, k, k_scales, softmax_scale, CAP, PRECISION, FORMAT)
            if QUERIES > 1:
                s = tl.where(_seen(keys[None, :], limits[:, None], WINDOW), s, float("-inf"))
            # Packed words are always finite: masking by addition is cheaper than a select.
            elif FORMAT == "packed":
                s += tl.where(inside, 0.0, float("-inf"))[None, :]
            else:
                s = tl.where(inside[None, :], s, float("-inf"))
            acc, m, z = _accumulate(acc, m, z, s, v, v_scales, DTYPE, PRECISION, FORMAT, EARLY)
    if SWAP:
        sums = tl.trans(acc[0])
        z = tl.sum(z, 0)
    else:
        sums = _whole(acc, GP, DP)
    if QUERIES > 1:
        z = tl.where(z > 0.0, z, 1.0)  # a query may see no key of this split
    d = tl.arange(0, DP)
    out_mask = is_query[:, None] & (d < D)[None, :]

    if SHARED_PARTS > 0:
        shared_cell = (row * KV_HEADS + head) * SHARED_PARTS
        for index in tl.static_range(SHARED_PARTS):
            lse = tl.load(shared_lse_ptr + (shared_cell + index) * GROUP + g, mask=g < GROUP, other=float("-inf"))
            shared_at = (shared_cell + index).to(tl.int64) * (GROUP * DP) + g[:, None] * DP + d[None, :]
            shared = tl.load(shared_partial_ptr + shared_at, mask=(g < GROUP)[:, None], other=0.0)
            top_now = tl.maximum(m, lse)
            mine, theirs_share = tl.math.exp2(m - top_now), tl.math.exp2(lse - top_now)
            sums = sums * mine[:, None] + shared * theirs_share[:, None]
            z = z * mine + theirs_share
            m = top_now
    if sinks_ptr is not None:
        # One of the splits has the sinks.
        sinks = tl.load(sinks_ptr + heads, mask=is_query, other=float("-inf"))
        sinks = tl.where(split == 0, sinks, float("-inf"))
        shrink, m, z = _with_sinks(m, tl.where(m == float("-inf"), 0.0, z), sinks)
        sums *= shrink[:, None]
        z = tl.where(z > 0.0, z, 1.0)
    if active == 1:
        tl.store(
            out_ptr + (tokens * (KV_HEADS * GROUP * D) + heads * D)[:, None] + d[None, :],
            (sums / z[:, None]).to(out_ptr.dtype.element_ty),
            mask=out_mask,
        )
        return
    cell = (first_cell * KV_HEADS + head * splits) * TURNS + turn * splits
    part_at = (cell + split).to(tl.int64) * (GP * DP) + g[:, None] * DP + d[None, :]
    tl.store(partial_ptr + part_at, sums / z[:, None], mask=out_mask)
    tl.store(lse_ptr + (cell + split) * GP + g, m + tl.math.log2(z), mask=is_query)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + cell, 1, sem="acq_rel")
    if arrived != active - 1:
        return
    tl.store(arrivals_ptr + cell, 0)
    joined = _join(partial_ptr, lse_ptr, cell, active, d, VECTORS, GJ, GP, DP, PARTS)
    j = tl.arange(0, GJ)
    query = turn * OWN + j // GROUP
    to = (start.to(tl.int64) + query) * (KV_HEADS * GROUP * D) + (head * GROUP + j % GROUP) * D
    tl.store(
        out_ptr + to[:, None] + d[None, :],
        joined.to(out_ptr.dtype.element_ty),
        mask=((j < VECTORS) & (query < QUERIES))[:, None] & (d < D)[None, :],
    )


@triton.jit
def _seen(keys, limits, WINDOW: tl.constexpr):
    """Which keys each query sees; `limits` are one more than its last key."""
    if WINDOW > 0:
        return (keys < limits) & (keys >= limits - WINDOW)
    return keys < limits


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    tile: int = 64
    splits: int = 1
    """Maximum splits of a row."""
    min_tiles: int = 1
    """Minimum key tiles per split; smaller splits are not worth the overhead."""
    warps: int = 2
    stages: int = 3
    swap: bool = False
    """Put keys, not queries, on the longer side of the matrix instruction. With 4 warps and tiles of 64 keys that is
    Hopper's warpgroup MMA."""
    own_queries: int = TILE_VECTORS
    """Maximum queries of a row in one program. With few rows combining splits takes longest, and several programs do it
    at the same time; they find the keys in L2."""


class SplitWorkspace:
    """Buffers for the partial results of splits, shared by all layers, which run one after the other. They never move,
    so captured graphs stay valid."""

    def __init__(self, cells: int, shape: AttentionShape, device: torch.device) -> None:
        """`cells`: maximum number of splits summed over KV heads and rows, without rows that are not split."""
        padded = padded_vectors(shape)
        width = padded_dim(shape.head_dim)
        self.cells = cells
        self.partial = torch.empty(cells * padded * width, dtype=torch.float32, device=device)
        self.lse = torch.empty(cells * padded, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(cells, dtype=torch.int32, device=device)


class SharedPrefix:
    """A prefix shared by all rows: its length in tokens, on the device, and buffers for partial results.

    The length is a multiple of SHARED_UNIT and less than that of every row."""

    def __init__(self, max_rows: int, shape: AttentionShape, device: torch.device, length: Tensor) -> None:
        width = padded_dim(shape.head_dim)
        cells = max_rows * shape.num_heads * SHARED_PARTS
        self.length = length
        self.max_rows = max_rows
        self.partial = torch.empty(cells * width, dtype=torch.float32, device=device)
        self.lse = torch.empty(cells, dtype=torch.float32, device=device)


def _parts(tuning: DecodeTuning, vectors: int, width: int) -> int:
    """The kernel's PARTS, rounded to a few distinct values, so that few kernels are compiled."""
    wanted = max(4, int(triton.next_power_of_2(tuning.splits)))
    return max(1, min(wanted, JOINED_ITEMS * tuning.warps // (vectors * width)))


def decode(
    queries: Tensor,
    kv: Tensor,
    out: Tensor,
    rows: PagedRows,
    shape: AttentionShape,
    workspace: SplitWorkspace,
    tuning: DecodeTuning,
    window: int = 0,
    *,
    all_single: bool = False,
    shared: SharedPrefix | None = None,
    listed: Tensor | None = None,
    queries_per_row: int = 1,
    sinks: Tensor | None = None,
) -> None:
    """Attention of the rows with exactly `queries_per_row` queries; other rows are skipped. `all_single`: there are no
    other rows. With `shared`, whose partial results must already be computed, only the keys after the shared prefix are
    attended here.

    Queries of a row are consecutive tokens, the last of its length. A row shorter than `queries_per_row` gives its
    first queries no keys and results of 0.

    `listed` int32 [LIST_COLUMNS, n]: these rows as a list, each in at most `tuning.splits` parts; for the columns see
    `ops/attention/decode_rule.py`."""
    num_rows = rows.seq_lens.shape[0]
    own = shape.queries_per_program(queries_per_row, tuning.own_queries)
    turns = -(-queries_per_row // own)
    vectors = int(triton.next_power_of_2(shape.group * own))
    if shared is not None and queries_per_row > 1:
        raise ValueError("with a shared prefix rows have one query")
    if shared is not None and (tuning.splits > 1 or window or listed is not None):
        raise ValueError("a shared prefix cannot be combined with splits, a window or a list of rows")
    if tuning.swap and format_of(kv) != "plain":
        raise ValueError("swapped operands need a plain KV cache")
    if listed is None and tuning.splits > 1 and num_rows * shape.num_kv_heads * turns * tuning.splits > workspace.cells:
        raise ValueError(f"{num_rows} rows in {tuning.splits} splits do not fit the workspace")
    grid = (num_rows, tuning.splits) if listed is None else (listed.shape[1], 1)
    _decode_kernel[(shape.num_kv_heads * turns, *grid)](
        queries, *cache_pointers(kv), out, workspace.partial, workspace.lse, workspace.arrivals,
        listed, rows.query_starts, rows.seq_lens, rows.table_rows, rows.block_tables,
        None if shared is None else shared.length, None if shared is None else shared.partial,
        None if shared is None else shared.lse, sinks,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), item_strides(kv)[1], tuning.splits,
        tuning.min_tiles if listed is None else 1,
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, QUERIES=queries_per_row, OWN=own,
        GP=padded_vectors(shape), GJ=vectors, **cache_sizes(kv, shape),
        TILE=tuning.tile,
        WINDOW=window, CAP=shape.softcap or 0.0, WIDE=is_wide(kv),
        PRECISION=precision(queries), DTYPE=TRITON_TYPES[queries.dtype], STAGES=tuning.stages,
        SWAP=tuning.swap, LISTED=listed is not None,
        ALL_SINGLE=all_single or listed is not None, PARTS=_parts(tuning, vectors, padded_dim(shape.head_dim)),
        SHARED_PARTS=0 if shared is None else SHARED_PARTS, NO_WEIGHT=NO_WEIGHT,
        num_warps=tuning.warps, **pdl_options(queries.device),
    )  # fmt: skip
