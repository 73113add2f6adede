"""Kernels around cuDNN's attention of long prompt chunks (`ops/attention/long_rows.py`).

One gathers a row's keys and values from their blocks, one combines attention over two disjoint sets of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.attention.four_bits import _load_numbers, _wide_vectors
from millrace.ops.triton.attention.paged_kv import (
    AttentionShape,
    PagedRows,
    _blocks_of,
    _load_packed,
    _load_scales,
    _places,
    _scales_of,
    cache_pointers,
    cache_sizes,
    item_strides,
    padded_dim,
)


@triton.jit
def _contiguous_kernel(
    kv_ptr, k_scales_ptr, v_scales_ptr, out_ptr, table_rows, tables,
    row, table_stride, block_stride, kind_stride, num_keys,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PART: tl.constexpr, BS: tl.constexpr,
    ITEMS: tl.constexpr, HEAD_ITEMS: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (keys, KV head, keys or values): from the row's blocks to [2, KV heads, keys, D]."""
    keys = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    kind = tl.program_id(2).to(tl.int64)
    inside = keys < num_keys
    d = tl.arange(0, PART)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    blocks = _blocks_of(table, keys, num_keys, BS).to(tl.int64)
    offset = head * HEAD_ITEMS + kind * kind_stride
    scale_offset = _scales_of(head, KV_HEADS, BS, ITEMS, HEAD_ITEMS, FORMAT)
    where = _places(blocks, keys, offset, block_stride, d, ITEMS, BS, True)
    k_scales, v_scales = _load_scales(
        k_scales_ptr, v_scales_ptr, blocks, keys, inside, scale_offset, block_stride, BS, True, FORMAT
    )
    to = out_ptr + ((kind * KV_HEADS + head) * num_keys + keys).to(tl.int64)[:, None] * D + d[None, :]
    if FORMAT == "packed":
        scales = tl.where(kind == 0, k_scales, v_scales)
        numbers = _load_packed(kv_ptr, where, D, BS, tl.float32, False)
        for quarter in tl.static_range(4):
            wide = numbers[quarter] * scales[:, None]
            tl.store(to + quarter * PART, wide.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    elif FORMAT == "int4":
        halves = _load_numbers(kv_ptr, where, d, D, DP, tl.float32)
        scale = tl.where(kind == 0, k_scales[0], v_scales[0])
        wide = _wide_vectors(halves, scale, tl.where(kind == 0, k_scales[1], v_scales[1]), kind == 0, BLOCK, D, DP)
        whole = tl.arange(0, DP)[None, :]
        to = out_ptr + ((kind * KV_HEADS + head) * num_keys + keys).to(tl.int64)[:, None] * D + whole
        tl.store(to, wide.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (whole < D))
    else:
        mask = inside[:, None] & (d < D)[None, :]
        tile = tl.load(kv_ptr + where, mask=mask, other=0.0)
        if FORMAT == "fp8":
            tile = tile.to(tl.float32) * tl.where(kind == 0, k_scales, v_scales)[:, None]
        tl.store(to, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join_kernel(
    one_ptr, one_lse, two_ptr, two_lse, out_ptr, num_queries, one_token, one_head, two_token, two_head,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (queries, head): combine attention over two sets of keys. Log-sum-exps are natural logarithms."""
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


def contiguous_kv(
    kv: Tensor, rows: PagedRows, row: int, num_keys: int, shape: AttentionShape, dtype: torch.dtype
) -> Tensor:
    """Keys and values of one row, gathered from their blocks: [2, kv_heads, keys, head_dim]."""
    items, _, k_scales, v_scales = cache_pointers(kv)
    out = torch.empty((2, shape.num_kv_heads, num_keys, shape.head_dim), dtype=dtype, device=kv.device)
    block, (kind_stride, block_stride) = 64, item_strides(kv)
    _contiguous_kernel[(triton.cdiv(num_keys, block), shape.num_kv_heads, 2)](
        items, k_scales, v_scales, out, rows.table_rows, rows.block_tables,
        row, rows.block_tables.stride(0), block_stride, kind_stride, num_keys,
        KV_HEADS=shape.num_kv_heads, **cache_sizes(kv, shape), BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def join(one: Tensor, one_lse: Tensor, two: Tensor, two_lse: Tensor, out: Tensor) -> None:
    """Combine attention results [heads, n, head_dim] over disjoint keys, with their log-sum-exps [heads, n], into `out`
    [n, heads · head_dim]."""
    heads, num_queries, head_dim = one.shape
    block = 16
    _join_kernel[(triton.cdiv(num_queries, block), heads)](
        one, one_lse.contiguous(), two, two_lse.contiguous(), out, num_queries,
        one.stride(1), one.stride(0), two.stride(1), two.stride(0),
        HEADS=heads, D=head_dim, DP=padded_dim(head_dim), BLOCK=block, num_warps=4,
    )  # fmt: skip
