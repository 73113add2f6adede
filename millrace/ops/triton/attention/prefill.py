"""Paged causal attention over tiles of many queries: prefill, and decode rows that share a prefix.

The kernels read the same paged cache as decode attention and share its online softmax. The query heads of one KV head
are packed into one tile, so each key and value is loaded once for all of them. Sizes that change from step to step are
read on the device: the grid is an upper bound and programs without work return at once, so a captured graph serves
every step of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.kv.cache import is_packed
from millrace.ops.triton.attention.context_split import ContextSplit
from millrace.ops.triton.attention.decode import SHARED_PARTS, DecodeTuning, SharedPrefix, SplitWorkspace, decode
from millrace.ops.triton.attention.paged_kv import (
    TRITON_TYPES,
    AttentionShape,
    PagedRows,
    _accumulate,
    _blocks_of,
    _load_keys,
    _load_queries,
    _load_scales,
    _load_unpacked,
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
    precision,
)
from millrace.ops.triton.dependent_launch import pdl_options

__all__ = [
    "AttentionShape",
    "ContextSplit",
    "DecodeTuning",
    "PagedRows",
    "PrefillTuning",
    "SharedPrefix",
    "SplitWorkspace",
    "decode",
    "prefill",
    "shared_prefix",
]


@triton.jit
def _shared_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, partial_ptr, lse_ptr, shared_len_ptr, table_rows, tables,
    softmax_scale, q_stride, table_stride, block_stride, num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PART: tl.constexpr,
    BS: tl.constexpr, ITEMS: tl.constexpr, HEAD_ITEMS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (rows, KV head, part of the shared prefix): each key is loaded once for many rows."""
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
    KIND: tl.constexpr = "plain" if FORMAT == "packed" else FORMAT
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    words = tl.arange(0, PART)
    row = tl.program_id(0) * ROWS + i // GROUP
    g = i % GROUP
    real = (i < ROWS * GROUP) & (row < num_rows)
    q_at = row.to(tl.int64)[:, None] * q_stride + (head * GROUP + g)[:, None] * D + d[None, :]
    q = _load_queries(q_ptr + q_at, real[:, None] & (d < D)[None, :], D, KIND)
    table = tables + tl.load(table_rows).to(tl.int64) * table_stride
    head_offset = head * HEAD_ITEMS
    scale_offset = _scales_of(head, KV_HEADS, BS, ITEMS, HEAD_ITEMS, FORMAT)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = _zeros(BLOCK_M, DP if FORMAT == "packed" else PART, KIND)
    # Block ids are loaded one tile ahead: a load that depends on another of the same iteration is not pipelined.
    blocks = _blocks_of(table, begin + tl.arange(0, TILE), end, BS)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        where = _places(blocks, keys, head_offset, block_stride, words, ITEMS, BS, WIDE)
        inside = keys < end
        k_scales, v_scales = _load_scales(
            k_scales_ptr, v_scales_ptr, blocks, keys, inside, scale_offset, block_stride, BS, WIDE, FORMAT
        )
        blocks = _blocks_of(table, keys + TILE, end, BS)
        if FORMAT == "packed":
            k = _load_unpacked(k_ptr, where, k_scales, D, BS, DTYPE, EARLY)
            v = _load_unpacked(v_ptr, where, v_scales, D, BS, DTYPE, EARLY)
        else:
            k = _load_keys(k_ptr, where, words, D, DP, BS, DTYPE, FORMAT, EARLY)
            v = _load_values(v_ptr, where, inside, words, D, DP, BS, False, DTYPE, FORMAT, EARLY)
        s = _scores(q, k, k_scales, softmax_scale, CAP, PRECISION, KIND)
        acc, m, z = _accumulate(acc, m, z, s, v, v_scales, DTYPE, PRECISION, KIND, EARLY)

    cell = (row * KV_HEADS + head) * PARTS + part
    to = cell.to(tl.int64)[:, None] * (GROUP * DP) + g[:, None] * DP + d[None, :]
    sums = _whole(acc, BLOCK_M, DP)
    tl.store(partial_ptr + to, sums / tl.where(z == 0.0, 1.0, z)[:, None], mask=real[:, None])
    tl.store(lse_ptr + cell * GROUP + g, m + tl.math.log2(z), mask=real)


@triton.jit
def _share(num_seen, num_others, TILE: tl.constexpr):
    """(begin, end, is_last): this program's share, in whole tiles, of the keys [0, num_seen) that every query of the
    tile sees, and whether it also has the remaining keys. The share may be empty."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    per_part = tl.cdiv(tl.cdiv(num_seen, TILE) + tl.cdiv(num_others, TILE), parts) * TILE
    begin = tl.minimum(part * per_part, num_seen)
    return begin, tl.minimum(begin + per_part, num_seen), part == parts - 1


@triton.jit
def _attend_pages(
    acc, m, z, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, first_position, end, positions,
    softmax_scale, block_stride, head_offset, scale_offset, d,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, ITEMS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries over all its keys in the cache; with SPLIT, over this program's share."""
    # Keys [begin, full) are seen by every query of the tile; [full, end) need the mask.
    full = (first_position + 1) // TILE * TILE
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        full = begin
    if SPLIT:
        begin, stop, is_last = _share(full, end - full, TILE)
        end = tl.where(is_last, end, stop)
        full = stop
    # Block ids are loaded one tile ahead: a load that depends on another of the same iteration is not pipelined.
    blocks = _blocks_of(table, begin + tl.arange(0, TILE), full, BS)
    for at in tl.range(begin, full, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        where = _places(blocks, keys, head_offset, block_stride, d, ITEMS, BS, WIDE)
        inside = keys < full
        k_scales, v_scales = _load_scales(
            k_scales_ptr, v_scales_ptr, blocks, keys, inside, scale_offset, block_stride, BS, WIDE, FORMAT
        )
        blocks = _blocks_of(table, keys + TILE, full, BS)
        k = _load_keys(k_ptr, where, d, D, DP, BS, DTYPE, FORMAT, EARLY)
        v = _load_values(v_ptr, where, inside, d, D, DP, BS, False, DTYPE, FORMAT, EARLY)
        s = _scores(q, k, k_scales, softmax_scale, CAP, PRECISION, FORMAT)
        acc, m, z = _accumulate(acc, m, z, s, v, v_scales, DTYPE, PRECISION, FORMAT, EARLY)
    for at in tl.range(full, end, TILE, num_stages=1):
        keys = at + tl.arange(0, TILE)
        inside = keys < end
        here = _blocks_of(table, keys, end, BS)
        where = _places(here, keys, head_offset, block_stride, d, ITEMS, BS, WIDE)
        k_scales, v_scales = _load_scales(
            k_scales_ptr, v_scales_ptr, here, keys, inside, scale_offset, block_stride, BS, WIDE, FORMAT
        )
        k = _load_keys(k_ptr, where, d, D, DP, BS, DTYPE, FORMAT, EARLY)
        v = _load_values(v_ptr, where, inside, d, D, DP, BS, True, DTYPE, FORMAT, EARLY)
        s = _scores(q, k, k_scales, softmax_scale, CAP, PRECISION, FORMAT)
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (positions[:, None] - keys[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        acc, m, z = _accumulate(acc, m, z, s, v, v_scales, DTYPE, PRECISION, FORMAT, EARLY)
    return acc, m, z


@triton.jit
def _attend_cached(
    acc, m, z, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, begin, context, first_position, positions,
    softmax_scale, block_stride, head_offset, scale_offset, part,
    D: tl.constexpr, BS: tl.constexpr, ITEMS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries over the packed keys [begin, context) of earlier steps, which all of them see,
    apart from a window."""
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    # Block ids are loaded one tile ahead: a load that depends on another of the same iteration is not pipelined.
    blocks = _blocks_of(table, begin + tl.arange(0, TILE), context, BS)
    for at in tl.range(begin, context, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        inside = keys < context
        where = _places(blocks, keys, head_offset, block_stride, part, ITEMS, BS, WIDE)
        k_scales, v_scales = _load_scales(
            k_scales_ptr, v_scales_ptr, blocks, keys, inside, scale_offset, block_stride, BS, WIDE, "packed"
        )
        blocks = _blocks_of(table, keys + TILE, context, BS)
        k = _load_unpacked(k_ptr, where, k_scales, D, BS, DTYPE, EARLY)
        v = _load_unpacked(v_ptr, where, v_scales, D, BS, DTYPE, EARLY)
        s = _scores(q, k, k_scales, softmax_scale, CAP, PRECISION, "plain")
        seen = inside[None, :]
        if WINDOW > 0:
            seen = seen & (positions[:, None] - keys[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        acc, m, z = _accumulate(acc, m, z, s, v, v_scales, DTYPE, PRECISION, "plain", EARLY)
    return acc, m, z


@triton.jit
def _attend_beside(
    acc, m, z, q, k_ptr, v_ptr, stride, first_query, end, queries, softmax_scale, d,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries over the keys of the same step, which lie beside them, not rounded."""
    full = (first_query + 1) // TILE * TILE
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_query - WINDOW + 1, 0) // TILE * TILE
        full = begin
    i = tl.arange(0, TILE)
    where = i[:, None] * stride + d[None, :]
    far = tl.zeros([1], tl.int64)  # offsets over many tokens need 64 bits
    ones = tl.full([TILE], 1.0, tl.float32)
    for at in tl.range(begin, full, TILE, num_stages=STAGES):
        first = (at + far)[:, None] * stride
        k = (tl.load(k_ptr + first + where),)
        v = (tl.load(v_ptr + first + where),)
        s = _scores(q, k, ones, softmax_scale, CAP, PRECISION, "plain")
        acc, m, z = _accumulate(acc, m, z, s, v, ones, DTYPE, PRECISION, "plain", EARLY)
    for at in tl.range(full, end, TILE, num_stages=1):
        keys = at + i
        inside = (keys < end)[:, None]
        first = (at + far)[:, None] * stride
        k = (tl.load(k_ptr + first + where, mask=inside, other=0.0),)
        v = (tl.load(v_ptr + first + where, mask=inside, other=0.0),)
        s = _scores(q, k, ones, softmax_scale, CAP, PRECISION, "plain")
        seen = keys[None, :] <= queries[:, None]
        if WINDOW > 0:
            seen = seen & (queries[:, None] - keys[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        acc, m, z = _accumulate(acc, m, z, s, v, ones, DTYPE, PRECISION, "plain", EARLY)
    return acc, m, z


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, partial_ptr, lse_ptr,
    tiles, query_starts, seq_lens, table_rows, tables, sinks_ptr,
    softmax_scale, q_stride, table_stride, block_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PART: tl.constexpr,
    BS: tl.constexpr, ITEMS: tl.constexpr, HEAD_ITEMS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per KV head and tile. A tile holds BLOCK_M // GROUP queries of one row, all heads of the group.

    With a packed cache, keys and values of this step are read beside the queries, not rounded, and only earlier ones
    from the cache. SPLIT: the programs of the grid's second dimension share the keys; a second kernel combines them."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # In list order, all heads of a tile together: tiles that see the most keys come first in their row, so that none of
    # them starts last; empty entries come at the end, while others still run.
    index = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    row = tl.load(tiles + index * 2)
    if row < 0:
        return
    offset = tl.load(tiles + index * 2 + 1)
    start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - start
    length = tl.load(seq_lens + row)
    context = length - num_queries

    QUERIES: tl.constexpr = BLOCK_M // GROUP
    KIND: tl.constexpr = "plain" if FORMAT == "packed" else FORMAT
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    local = offset + i // GROUP
    heads = head * GROUP + i % GROUP
    real = (i < QUERIES * GROUP) & (local < num_queries)
    token = (start + local).to(tl.int64)
    mine = q_ptr + token[:, None] * q_stride + heads[:, None] * D
    positions = context + local
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    head_offset = head * HEAD_ITEMS
    scale_offset = _scales_of(head, KV_HEADS, BS, ITEMS, HEAD_ITEMS, FORMAT)
    q = _load_queries(mine + d[None, :], real[:, None] & (d < D)[None, :], D, KIND)
    acc = _zeros(BLOCK_M, DP if FORMAT == "packed" else PART, KIND)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    if FORMAT == "packed":
        begin = 0
        end = context
        if SPLIT:
            begin, end, is_last = _share(context, tl.minimum(offset + QUERIES, num_queries), TILE)
        acc, m, z = _attend_cached(
            acc, m, z, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, begin, end, context + offset, positions,
            softmax_scale, block_stride, head_offset, scale_offset, tl.arange(0, PART),
            D, BS, ITEMS, TILE, WINDOW, CAP, WIDE, PRECISION, DTYPE, STAGES, EARLY,
        )  # fmt: skip
        own = q_ptr + start.to(tl.int64) * q_stride + (KV_HEADS * GROUP + head) * D
        own_end = tl.minimum(offset + QUERIES, num_queries)
        first_query = offset
        if SPLIT:
            own_end = tl.where(is_last, own_end, 0)
            first_query = tl.where(is_last, offset, -1)  # and no tile that every query sees
        acc, m, z = _attend_beside(
            acc, m, z, q, own, own + KV_HEADS * D, q_stride, first_query, own_end, local,
            softmax_scale, d, TILE, WINDOW, CAP, PRECISION, DTYPE, STAGES, EARLY,
        )  # fmt: skip
    else:
        acc, m, z = _attend_pages(
            acc, m, z, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, context + offset,
            tl.minimum(context + offset + QUERIES, length), positions,
            softmax_scale, block_stride, head_offset, scale_offset, tl.arange(0, PART),
            D, DP, BS, ITEMS, TILE, WINDOW, CAP, WIDE, PRECISION, DTYPE, STAGES, FORMAT, SPLIT, EARLY,
        )  # fmt: skip

    sums = _whole(acc, BLOCK_M, DP)
    if sinks_ptr is not None:
        # One of the programs that share the keys has the sinks.
        sinks = tl.load(sinks_ptr + heads, mask=real, other=float("-inf"))
        sinks = tl.where(tl.program_id(1) == 0, sinks, float("-inf"))
        shrink, m, z = _with_sinks(m, z, sinks)
        sums *= shrink[:, None]
    if SPLIT:
        # A program without keys stores zeros and a log-sum-exp of -inf.
        cell = (token * KV_HEADS + head) * tl.num_programs(1) + tl.program_id(1)
        at = cell * GROUP + i % GROUP
        tl.store(
            partial_ptr + at[:, None] * DP + d[None, :],
            sums / tl.where(z == 0.0, 1.0, z)[:, None],
            mask=real[:, None],
        )
        tl.store(lse_ptr + at, m + tl.math.log2(z), mask=real)
    else:
        out_at = token[:, None] * (KV_HEADS * GROUP * D) + heads[:, None] * D + d[None, :]
        out = (sums / tl.where(z == 0.0, 1.0, z)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, out, mask=real[:, None] & (d < D)[None, :])


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    block_m: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 3

    def queries_per_tile(self, group: int) -> int:
        return self.block_m // group


def shared_prefix(queries: Tensor, kv: Tensor, rows: PagedRows, shape: AttentionShape, shared: SharedPrefix) -> None:
    """Attention of every row's query over the shared prefix, for `decode` to combine with the rest."""
    num_rows, block_m = rows.seq_lens.shape[0], 128 if shape.head_dim <= 128 else 64
    block_m = max(block_m, triton.next_power_of_2(shape.group))
    tile, stages = (64, 3) if shape.head_dim <= 128 and queries.dtype != torch.float32 else (32, 2)
    _shared_kernel[(triton.cdiv(num_rows, block_m // shape.group), shape.num_kv_heads, SHARED_PARTS)](
        queries, *cache_pointers(kv), shared.partial, shared.lse, shared.length, rows.table_rows, rows.block_tables,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), item_strides(kv)[1], num_rows,
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, **cache_sizes(kv, shape),
        BLOCK_M=block_m, TILE=tile, PARTS=SHARED_PARTS,
        CAP=shape.softcap or 0.0, WIDE=is_wide(kv), PRECISION=precision(queries),
        DTYPE=TRITON_TYPES[queries.dtype], STAGES=stages, num_warps=8,
        **pdl_options(queries.device),
    )  # fmt: skip


def prefill(
    queries: Tensor,
    kv: Tensor,
    out: Tensor,
    tiles: Tensor,
    rows: PagedRows,
    shape: AttentionShape,
    tuning: PrefillTuning,
    window: int = 0,
    split: ContextSplit | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of tiles of queries. `tiles` [n, 2]: (row, first query of the row), or row -1 for an empty entry. They
    start in this order: a row's last tiles should come first, empty entries at the end. With a packed cache, `queries`
    are a view of the fused projection, whose key and value heads hold the step's own, rotated.

    With `split`, every query must be in a tile, and several programs share the keys of each tile."""
    if is_packed(kv) and queries.stride(0) < (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim:
        raise ValueError(
            "with a packed KV cache, queries must be a view of the fused projection, beside the step's keys and values"
        )
    if split is not None:
        split.check(queries.shape[0], shape, window)
    _prefill_kernel[(tiles.shape[0] * shape.num_kv_heads, 1 if split is None else split.parts)](
        queries, *cache_pointers(kv), out,
        None if split is None else split.workspace.partial, None if split is None else split.workspace.lse,
        tiles, rows.query_starts, rows.seq_lens, rows.table_rows, rows.block_tables, sinks,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), item_strides(kv)[1],
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, **cache_sizes(kv, shape),
        BLOCK_M=tuning.block_m, TILE=tuning.tile,
        WINDOW=window, CAP=shape.softcap or 0.0, WIDE=is_wide(kv),
        PRECISION=precision(queries), DTYPE=TRITON_TYPES[queries.dtype], STAGES=tuning.stages,
        SPLIT=split is not None, num_warps=tuning.warps, **pdl_options(queries.device),
    )  # fmt: skip
    if split is not None:
        split.join(out, shape)
