"""Paged causal attention: one kernel for rows with a single query (decode), one for tiles of many queries (prefill).

Both read the same paged cache and share their inner step. The query heads of one KV head are packed into one tile, so
each key and value is loaded once for all of them. Every size that changes from step to step is read on the device:
a launch is described by upper bounds alone, and programs without work return at once, so a captured launch serves
every step of its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton import early_start

SHARED_PARTS = 4
"""Parts a shared prefix is cut into, so that few rows still fill the chip."""
SHARED_UNIT = 128
"""Shared prefixes are used in whole tiles of this many tokens."""
MOST_SPLITS = 64
"""Splits of one row: what the join of their results has room for."""


@triton.jit
def _scores(q, k, softmax_scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """In units of log2, capped if the model caps."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP > 0.0:
        x = s * (softmax_scale / CAP)
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -t, t) * (CAP * 1.4426950408889634)
    return s * (softmax_scale * 1.4426950408889634)


@triton.jit
def _accumulate(acc, m, z, s, v, PRECISION: tl.constexpr):
    """One step of the running softmax. A row that has seen no key yet keeps a maximum of -inf and weights of 0."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - safe[:, None])
    alpha = tl.math.exp2(m - safe)
    z = z * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, z


@triton.jit
def _load_tile(cache, table, keys, head_offset, block_stride, last, d, D: tl.constexpr, BS: tl.constexpr,
               DP: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Keys or values [TILE, DP] at positions `keys`, found through the row's block table."""
    if MASKED:
        blocks = tl.load(table + keys // BS, mask=keys < last, other=0)
    else:
        blocks = tl.load(table + keys // BS)
    if WIDE:
        blocks = blocks.to(tl.int64)
    at = blocks * block_stride + head_offset + (keys % BS) * D
    where = cache + at[:, None] + d[None, :]
    if MASKED:
        tile = tl.load(where, mask=(keys < last)[:, None] & (d < D)[None, :], other=0.0)
    elif DP != D:
        tile = tl.load(where, mask=(d < D)[None, :], other=0.0)
    else:
        tile = tl.load(where)
    return tile.to(DTYPE)


@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, arrivals_ptr,
    query_starts, seq_lens, table_rows, tables, shared_len_ptr, shared_partial_ptr, shared_lse_ptr,
    softmax_scale, q_stride, table_stride, block_stride, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, ALL_SINGLE: tl.constexpr, MOST_SPLITS: tl.constexpr,
    SHARED_PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, split). Splits of a row and head are joined by the last of them to arrive."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    # All that the row is known by is asked for at once: a chain of loads would cost more than the attention itself.
    last = tl.load(seq_lens + row)
    table_row = tl.load(table_rows + row).to(tl.int64)
    # Rows and tables were written at the start of the step; what the kernel just before wrote is only read from here.
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ALL_SINGLE:
        start = row
    else:
        start = tl.load(query_starts + row)
        if tl.load(query_starts + row + 1) - start != 1:
            return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW, 0)
    if SHARED_PARTS > 0:
        first = tl.load(shared_len_ptr)
    first_tile = first // TILE
    tiles = tl.cdiv(last, TILE) - first_tile
    per_split = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    active = tl.cdiv(tiles, per_split)
    if SHARED_PARTS > 0:
        # A row of padding has no keys of its own.
        active = tl.maximum(active, 1)
    if split >= active:
        return
    begin = (first_tile + split * per_split) * TILE
    end = tl.minimum(begin + per_split * TILE, last)

    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    heads = head * GROUP + g
    q_at = start.to(tl.int64) * q_stride + heads[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_at, mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    table = tables + table_row * table_stride
    head_offset = head * BS * D

    m = tl.full([GP], float("-inf"), tl.float32)
    z = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        k = _load_tile(k_ptr, table, keys, head_offset, block_stride, last, d, D, BS, DP, WIDE, True, DTYPE)
        s = _scores(q, k, softmax_scale, CAP, PRECISION)
        seen = keys < last
        if WINDOW > 0:
            seen = seen & (keys >= first)
        s = tl.where(seen[None, :], s, float("-inf"))
        v = _load_tile(v_ptr, table, keys, head_offset, block_stride, last, d, D, BS, DP, WIDE, True, DTYPE)
        acc, m, z = _accumulate(acc, m, z, s, v, PRECISION)

    out_at = start.to(tl.int64) * (KV_HEADS * GROUP * D) + heads[:, None] * D + d[None, :]
    out_mask = (g < GROUP)[:, None] & (d < D)[None, :]
    if SHARED_PARTS > 0:
        shared_cell = (row * KV_HEADS + head) * SHARED_PARTS
        for part in tl.static_range(SHARED_PARTS):
            lse = tl.load(shared_lse_ptr + (shared_cell + part) * GROUP + g, mask=g < GROUP, other=float("-inf"))
            shared_at = (shared_cell + part).to(tl.int64) * (GROUP * DP) + g[:, None] * DP + d[None, :]
            shared = tl.load(shared_partial_ptr + shared_at, mask=(g < GROUP)[:, None], other=0.0)
            top_now = tl.maximum(m, lse)
            mine, theirs_share = tl.math.exp2(m - top_now), tl.math.exp2(lse - top_now)
            acc = acc * mine[:, None] + shared * theirs_share[:, None]
            z = z * mine + theirs_share
            m = top_now
    if active == 1:
        tl.store(out_ptr + out_at, (acc / z[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
        return
    cell = (row * KV_HEADS + head) * splits
    part_at = (cell + split).to(tl.int64) * (GP * DP) + g[:, None] * DP + d[None, :]
    tl.store(partial_ptr + part_at, acc / z[:, None], mask=out_mask)
    tl.store(lse_ptr + (cell + split) * GP + g, m + tl.math.log2(z), mask=g < GROUP)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row * KV_HEADS + head, 1, sem="acq_rel")
    if arrived != active - 1:
        return
    tl.store(arrivals_ptr + row * KV_HEADS + head, 0)
    parts = tl.arange(0, MOST_SPLITS)
    weights = tl.load(
        lse_ptr + (cell + parts[:, None]) * GP + g[None, :],
        mask=(parts < active)[:, None] & (g < GROUP)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.where(g < GROUP, tl.max(weights, 0), 0.0)
    total = tl.sum(tl.math.exp2(weights - top[None, :]), 0)
    total = tl.where(g < GROUP, total, 1.0)
    joined = tl.zeros([GP, DP], tl.float32)
    for first_part in range(0, active, 4):
        # Four at a time, so that their loads are in flight together.
        for step in tl.static_range(4):
            index = first_part + step
            here = tl.zeros([GP], tl.int32) + index < active
            lse = tl.load(
                lse_ptr + (cell + index) * GP + g, mask=(g < GROUP) & here, other=float("-inf"), cache_modifier=".cg"
            )
            theirs = (cell + index).to(tl.int64) * (GP * DP) + g[:, None] * DP + d[None, :]
            partial = tl.load(partial_ptr + theirs, mask=out_mask & here[:, None], other=0.0, cache_modifier=".cg")
            joined += partial * tl.math.exp2(lse - top)[:, None]
    tl.store(out_ptr + out_at, (joined / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _shared_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, shared_len_ptr, table_rows, tables,
    softmax_scale, q_stride, table_stride, block_stride, num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (rows, kv head, part of the prefix that all rows share): each key is loaded once for many rows."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(shared_len_ptr)
    per_part = tl.cdiv(tl.cdiv(length, TILE), PARTS) * TILE
    begin = part * per_part
    end = tl.minimum(begin + per_part, length)

    ROWS: tl.constexpr = BLOCK_M // GROUP
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    row = tl.program_id(0) * ROWS + i // GROUP
    g = i % GROUP
    real = (i < ROWS * GROUP) & (row < num_rows)
    q_at = row.to(tl.int64)[:, None] * q_stride + (head * GROUP + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    table = tables + tl.load(table_rows).to(tl.int64) * table_stride
    head_offset = head * BS * D

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        k = _load_tile(k_ptr, table, keys, head_offset, block_stride, end, d, D, BS, DP, WIDE, False, DTYPE)
        s = _scores(q, k, softmax_scale, CAP, PRECISION)
        v = _load_tile(v_ptr, table, keys, head_offset, block_stride, end, d, D, BS, DP, WIDE, False, DTYPE)
        acc, m, z = _accumulate(acc, m, z, s, v, PRECISION)

    cell = (row * KV_HEADS + head) * PARTS + part
    to = cell.to(tl.int64)[:, None] * (GROUP * DP) + g[:, None] * DP + d[None, :]
    tl.store(partial_ptr + to, acc / tl.where(z == 0.0, 1.0, z)[:, None], mask=real[:, None])
    tl.store(lse_ptr + cell * GROUP + g, m + tl.math.log2(z), mask=real)


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tiles, query_starts, seq_lens, table_rows, tables,
    softmax_scale, q_stride, table_stride, block_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, kv head). A tile holds BLOCK_M // GROUP queries of one row, all heads of the group."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Later tiles of a row see more keys: they go first, so that the chip is not left with the longest at the end.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles + index * 2)
    if row < 0:
        return
    offset = tl.load(tiles + index * 2 + 1)
    start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - start
    length = tl.load(seq_lens + row)
    context = length - num_queries

    QUERIES: tl.constexpr = BLOCK_M // GROUP
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    local = offset + i // GROUP
    heads = head * GROUP + i % GROUP
    real = (i < QUERIES * GROUP) & (local < num_queries)
    token = (start + local).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * q_stride + heads[:, None] * D + d[None, :],
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )
    positions = context + local
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    head_offset = head * BS * D

    # Keys [begin, full) are seen by every query of the tile; [full, end) need the mask.
    end = tl.minimum(context + offset + QUERIES, length)
    full = (context + offset + 1) // TILE * TILE
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + offset - WINDOW + 1, 0) // TILE * TILE
        full = begin

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    for at in tl.range(begin, full, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        k = _load_tile(k_ptr, table, keys, head_offset, block_stride, end, d, D, BS, DP, WIDE, False, DTYPE)
        s = _scores(q, k, softmax_scale, CAP, PRECISION)
        v = _load_tile(v_ptr, table, keys, head_offset, block_stride, end, d, D, BS, DP, WIDE, False, DTYPE)
        acc, m, z = _accumulate(acc, m, z, s, v, PRECISION)
    for at in tl.range(full, end, TILE, num_stages=1):
        keys = at + tl.arange(0, TILE)
        k = _load_tile(k_ptr, table, keys, head_offset, block_stride, end, d, D, BS, DP, WIDE, True, DTYPE)
        s = _scores(q, k, softmax_scale, CAP, PRECISION)
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (positions[:, None] - keys[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        v = _load_tile(v_ptr, table, keys, head_offset, block_stride, end, d, D, BS, DP, WIDE, True, DTYPE)
        acc, m, z = _accumulate(acc, m, z, s, v, PRECISION)

    out_at = token[:, None] * (KV_HEADS * GROUP * D) + heads[:, None] * D + d[None, :]
    out = (acc / tl.where(z == 0.0, 1.0, z)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=real[:, None] & (d < D)[None, :])


TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a launch finds its rows. All tensors int32 on the device."""

    query_starts: Tensor
    seq_lens: Tensor
    table_rows: Tensor
    """[n]: the row of `block_tables` that each row reads."""
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    tile: int = 64
    splits: int = 1
    min_tiles: int = 2
    """Tiles of keys below which a split is not worth its overhead."""
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    block_m: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 3

    def queries_per_tile(self, group: int) -> int:
        return self.block_m // group


class SplitWorkspace:
    """Room for the partial results of splits, shared by all layers: they run one after the other. It never moves, so
    captured launches stay good."""

    def __init__(self, cells: int, shape: HeadShape, device: torch.device) -> None:
        """`cells` is the most splits of all rows and KV heads together, where there is more than one per row."""
        padded = _padded_group(shape)
        width = triton.next_power_of_2(shape.head_dim)
        self.cells = cells
        self.partial = torch.empty(cells * padded * width, dtype=torch.float32, device=device)
        self.lse = torch.empty(cells * padded, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(cells, dtype=torch.int32, device=device)


class SharedPrefix:
    """What rows with a common beginning share: its length in tokens, on the device, and room for the partial results.

    The length is a multiple of SHARED_UNIT and below that of every row."""

    def __init__(self, most_rows: int, shape: HeadShape, device: torch.device, length: Tensor) -> None:
        width = triton.next_power_of_2(shape.head_dim)
        cells = most_rows * shape.num_heads * SHARED_PARTS
        self.length = length
        self.most_rows = most_rows
        self.partial = torch.empty(cells * width, dtype=torch.float32, device=device)
        self.lse = torch.empty(cells, dtype=torch.float32, device=device)


def _padded_group(shape: HeadShape) -> int:
    return max(16, int(triton.next_power_of_2(shape.group)))


def _is_wide(kv: Tensor) -> bool:
    """Offsets inside the cache need 64 bits."""
    return kv[0].numel() >= 2**31


def _precision(queries: Tensor) -> str:
    return "ieee" if queries.dtype == torch.float32 else "tf32"


def decode(
    queries: Tensor,
    kv: Tensor,
    out: Tensor,
    rows: PagedRows,
    shape: HeadShape,
    workspace: SplitWorkspace,
    tuning: DecodeTuning,
    window: int = 0,
    *,
    all_single: bool = False,
    shared: SharedPrefix | None = None,
) -> None:
    """Attention of the rows that have exactly one query; other rows are left alone. `all_single` says there are none
    of those. With `shared`, whose part has been computed, a row's keys begin where the shared ones end."""
    num_rows = rows.seq_lens.shape[0]
    if shared is not None and (tuning.splits > 1 or window):
        raise ValueError("a shared prefix goes with neither splits nor a window")
    if tuning.splits > MOST_SPLITS:
        raise ValueError(f"{tuning.splits} splits are more than {MOST_SPLITS}")
    if tuning.splits > 1 and num_rows * shape.num_kv_heads * tuning.splits > workspace.cells:
        raise ValueError(f"{num_rows} rows in {tuning.splits} splits do not fit the workspace")
    _decode_kernel[(num_rows, shape.num_kv_heads, tuning.splits)](
        queries, kv[0], kv[1], out, workspace.partial, workspace.lse, workspace.arrivals,
        rows.query_starts, rows.seq_lens, rows.table_rows, rows.block_tables,
        None if shared is None else shared.length, None if shared is None else shared.partial,
        None if shared is None else shared.lse,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), kv.stride(1), tuning.splits,
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, GP=_padded_group(shape), D=shape.head_dim,
        DP=triton.next_power_of_2(shape.head_dim), BS=kv.shape[3], TILE=tuning.tile,
        MIN_TILES=tuning.min_tiles, WINDOW=window, CAP=shape.softcap or 0.0, WIDE=_is_wide(kv),
        PRECISION=_precision(queries), DTYPE=TRITON_TYPES[queries.dtype], STAGES=tuning.stages,
        ALL_SINGLE=all_single, MOST_SPLITS=MOST_SPLITS, SHARED_PARTS=0 if shared is None else SHARED_PARTS,
        num_warps=tuning.warps, **early_start(queries.device),
    )  # fmt: skip


def shared_prefix(queries: Tensor, kv: Tensor, rows: PagedRows, shape: HeadShape, shared: SharedPrefix) -> None:
    """What every row's one query sees of the keys that all rows share, for `decode` to add to the rest."""
    num_rows, block_m = rows.seq_lens.shape[0], 128 if shape.head_dim <= 128 else 64
    block_m = max(block_m, triton.next_power_of_2(shape.group))
    tile = 128 if shape.head_dim <= 128 and queries.dtype != torch.float32 else 32
    _shared_kernel[(triton.cdiv(num_rows, block_m // shape.group), shape.num_kv_heads, SHARED_PARTS)](
        queries, kv[0], kv[1], shared.partial, shared.lse, shared.length, rows.table_rows, rows.block_tables,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), kv.stride(1), num_rows,
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, D=shape.head_dim,
        DP=triton.next_power_of_2(shape.head_dim), BS=kv.shape[3], BLOCK_M=block_m, TILE=tile, PARTS=SHARED_PARTS,
        CAP=shape.softcap or 0.0, WIDE=_is_wide(kv), PRECISION=_precision(queries),
        DTYPE=TRITON_TYPES[queries.dtype], STAGES=2, num_warps=8,
        **early_start(queries.device),
    )  # fmt: skip


def prefill(
    queries: Tensor,
    kv: Tensor,
    out: Tensor,
    tiles: Tensor,
    rows: PagedRows,
    shape: HeadShape,
    tuning: PrefillTuning,
    window: int = 0,
) -> None:
    """Attention of tiles [n, 2] of queries: (row, first query of it), or a row of -1 for none."""
    _prefill_kernel[(tiles.shape[0], shape.num_kv_heads)](
        queries, kv[0], kv[1], out, tiles, rows.query_starts, rows.seq_lens, rows.table_rows, rows.block_tables,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), kv.stride(1),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, D=shape.head_dim,
        DP=triton.next_power_of_2(shape.head_dim), BS=kv.shape[3], BLOCK_M=tuning.block_m, TILE=tuning.tile,
        WINDOW=window, CAP=shape.softcap or 0.0, WIDE=_is_wide(kv),
        PRECISION=_precision(queries), DTYPE=TRITON_TYPES[queries.dtype], STAGES=tuning.stages,
        num_warps=tuning.warps, **early_start(queries.device),
    )  # fmt: skip


@triton.jit
def _contiguous_kernel(
    kv_ptr, out_ptr, table_rows, tables, row, table_stride, block_stride, kind_stride, num_keys,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (keys, kv head, keys or values): from the row's pages to [2, kv heads, keys, D]."""
    keys = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    kind = tl.program_id(2).to(tl.int64)
    inside = keys < num_keys
    d = tl.arange(0, DP)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    blocks = tl.load(table + keys // BS, mask=inside, other=0).to(tl.int64)
    at = kind * kind_stride + blocks * block_stride + head * BS * D + (keys % BS) * D
    mask = inside[:, None] & (d < D)[None, :]
    tile = tl.load(kv_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
    to = ((kind * KV_HEADS + head) * num_keys + keys).to(tl.int64) * D
    tl.store(out_ptr + to[:, None] + d[None, :], tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join_kernel(
    one_ptr, one_lse, two_ptr, two_lse, out_ptr, num_queries, one_token, one_head, two_token, two_head,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (queries, head): two attentions over different keys become one over both. Weights are natural logs."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    inside = i < num_queries
    d = tl.arange(0, DP)
    first = tl.load(one_lse + head * num_queries + i, mask=inside, other=0.0)
    second = tl.load(two_lse + head * num_queries + i, mask=inside, other=0.0)
    share = 1.0 / (1.0 + tl.exp(second - first))
    mask = inside[:, None] & (d < D)[None, :]
    wide = i.to(tl.int64)[:, None]
    one = tl.load(one_ptr + wide * one_token + head * one_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
    two = tl.load(two_ptr + wide * two_token + head * two_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
    joined = one * share[:, None] + two * (1.0 - share)[:, None]
    tl.store(out_ptr + wide * (HEADS * D) + head * D + d[None, :], joined.to(out_ptr.dtype.element_ty), mask=mask)


def contiguous_kv(kv: Tensor, rows: PagedRows, row: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Keys and values of one row out of their pages: [2, kv_heads, keys, head_dim]."""
    _, _, kv_heads, block_size, head_dim = kv.shape
    out = torch.empty((2, kv_heads, num_keys, head_dim), dtype=dtype, device=kv.device)
    block = 64
    _contiguous_kernel[(triton.cdiv(num_keys, block), kv_heads, 2)](
        kv, out, rows.table_rows, rows.block_tables, row, rows.block_tables.stride(0), kv.stride(1), kv.stride(0),
        num_keys, KV_HEADS=kv_heads, D=head_dim, DP=triton.next_power_of_2(head_dim), BS=block_size, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def join(one: Tensor, one_lse: Tensor, two: Tensor, two_lse: Tensor, out: Tensor) -> None:
    """Attentions [heads, n, head_dim] with log-sums [heads, n], over disjoint keys, into out [n, heads · head_dim]."""
    heads, num_queries, head_dim = one.shape
    block = 16
    _join_kernel[(triton.cdiv(num_queries, block), heads)](
        one, one_lse.contiguous(), two, two_lse.contiguous(), out, num_queries,
        one.stride(1), one.stride(0), two.stride(1), two.stride(0),
        HEADS=heads, D=head_dim, DP=triton.next_power_of_2(head_dim), BLOCK=block, num_warps=4,
    )  # fmt: skip
