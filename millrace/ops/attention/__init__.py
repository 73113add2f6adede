"""Causal attention over the paged cache, for any mixture of prefilling and decoding rows.

make(num_heads, num_kv_heads, head_dim, scale, softcap) -> Attention.
"""

from __future__ import annotations

from functools import partial

from millrace.ops.attention.batched import BatchedAttention
from millrace.ops.attention.native import MAX_HEAD_DIM, NativeAttention
from millrace.ops.attention.paged import PagedAttention
from millrace.ops.attention.reference import ReferenceAttention
from millrace.ops.attention.rows import Attention, Rows
from millrace.ops.native import DTYPES, native_missing
from millrace.ops.triton import triton_missing
from millrace.ops.version import Version

__all__ = [
    "VERSIONS",
    "Attention",
    "BatchedAttention",
    "NativeAttention",
    "PagedAttention",
    "ReferenceAttention",
    "Rows",
]

VERSIONS = (
    Version(
        op="attention",
        name="native",
        make=NativeAttention,
        when="C++: one pass over the paged cache, each query summed over the same tiles of keys whatever the batch",
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
        when="Triton: one pass over the paged cache, rows with one query split along their keys when they are few",
        devices=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="attention",
        name="paged_tiles",
        make=partial(PagedAttention, everything_tiled=True),
        when="Triton: every query in the same tiling, so that its sums never depend on the batch",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="attention",
        name="batched",
        make=BatchedAttention,
        when="rows with equally many queries go through the library's attention together",
    ),
    Version(
        op="attention",
        name="reference",
        make=ReferenceAttention,
        when="defines the meaning: row by row in float32",
    ),
)
