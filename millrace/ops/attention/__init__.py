"""Causal attention over the paged KV cache, for any mix of prefill and decode rows, and the op before it (`qkv.py`).

make(num_heads, num_kv_heads, head_dim, scale, softcap) -> Attention

`rows.py` defines the interface and `reference.py` the meaning; `paged.py` is the GPU version, `native.py` the CPU one.
May import elementwise, kv, triton, tuning, cpp and base.
"""

from __future__ import annotations

from functools import partial

from millrace.ops.attention.batched import BatchedAttention
from millrace.ops.attention.native import MAX_HEAD_DIM, NativeAttention
from millrace.ops.attention.paged import PagedAttention
from millrace.ops.attention.reference import ReferenceAttention
from millrace.ops.attention.rows import Attention, AttentionRows, PlainRows, TiledRows
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, native_missing
from millrace.ops.triton import triton_missing

__all__ = [
    "VERSIONS",
    "Attention",
    "AttentionRows",
    "BatchedAttention",
    "NativeAttention",
    "PagedAttention",
    "PlainRows",
    "ReferenceAttention",
    "TiledRows",
]

VERSIONS = (
    Version(
        op="attention",
        name="native",
        make=NativeAttention,
        when="C++: one pass over the paged cache, each query summed over the same key tiles whatever the batch",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        fits=lambda shape: bool(shape["head_dim"] <= MAX_HEAD_DIM),
        missing=native_missing,
    ),
    Version(
        op="attention",
        name="paged",
        make=PagedAttention,
        when="Triton: one pass over the paged cache; few decode rows are split along their keys",
        devices=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="attention",
        name="paged_tiles",
        make=partial(PagedAttention, tile_decode_rows=True),
        when="Triton: the same tiling for every query, so that its sums never depend on the batch",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="attention",
        name="batched",
        make=BatchedAttention,
        when="torch's scaled_dot_product_attention over groups of rows with equally many queries",
    ),
    Version(
        op="attention",
        name="reference",
        make=ReferenceAttention,
        when="the reference: row by row in float32",
    ),
)
