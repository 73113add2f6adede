"""Token embeddings, alone or tied: sharing one matrix with the LM head.

embedding:       make(weight) -> Embedding
tied_embedding:  make(weight) -> TiedEmbedding: `rows(ids)` looks tokens up, `head` is the LM head over the same memory

The weight is a Tensor; for native versions with `stored` in the shape, a `StoredWeight`; with `kept`, a GroupedWeight
or BlockWeight, whose rows are dequantised as they are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.version import Shape, Version
from millrace.ops.cpp.native import DTYPES, native_missing
from millrace.ops.linear.block_planes import PlanesLinear, kind_of
from millrace.ops.linear.block_weight import BlockWeight
from millrace.ops.linear.dense import Head, InvariantLinear, NativeParts, PlainLinear, TiledLinear, TunedLinear
from millrace.ops.linear.grouped import make_triton
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.packed_codes import packed_missing
from millrace.ops.linear.stored import StoredLinear, StoredWeight, native_linear
from millrace.ops.triton import hopper_missing, triton_missing

KeptWeight = GroupedWeight | BlockWeight


class Embedding(Protocol):
    @property
    def matrix(self) -> Tensor | None:
        """[vocab, hidden] if it is a plain matrix, else None."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]"""
        ...


class TiedEmbedding(Protocol):
    head: Head
    rows: Embedding


class PlainEmbedding:
    """Rows of a plain matrix, which is not copied."""

    def __init__(self, weight: Tensor) -> None:
        self.matrix = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.matrix)


class NativeEmbedding:
    """Rows of a packed matrix."""

    matrix = None

    def __init__(self, linear: NativeParts) -> None:
        self._linear = linear

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._linear.take_rows(token_ids)


class NativeTiedEmbedding:
    """One packed matrix, read by rows for embeddings and as a linear layer for logits."""

    def __init__(self, weight: Tensor | StoredWeight) -> None:
        self.head = native_linear(weight)
        self.rows = NativeEmbedding(self.head)


class PlainTiedEmbedding:
    def __init__(self, weight: Tensor, head: Callable[[Tensor], Head] = PlainLinear) -> None:
        self.rows = PlainEmbedding(weight)
        self.head = head(weight)


def rows_of(weight: KeptWeight, ids: Tensor) -> Tensor:
    """int64 [T] -> [T, K] in the weight's dtype. Nothing waits for the device."""
    if isinstance(weight, BlockWeight):
        from millrace.ops.triton.blocks.product import decode, operand  # slow to import

        return decode(operand(weight.kind, weight.blocks.index_select(0, ids), weight.in_features), weight.dtype)
    own = {
        name: part.index_select(0, ids)
        for name in ("codes", "zeros", "output_scales", "offsets")
        if (part := getattr(weight, name)) is not None
    }
    scales = weight.scales.index_select(0, ids // weight.rows_per_scale)
    return replace(weight, **own, scales=scales, rows_per_scale=1).dequantised().to(weight.dtype)


class KeptEmbedding:
    """Rows of a quantised matrix on a GPU."""

    matrix = None

    def __init__(self, weight: KeptWeight) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return rows_of(self._weight, token_ids)


class KeptTiedEmbedding:
    """One quantised matrix; the LM head dequantises tiles in registers."""

    rows: Embedding
    head: Head

    def __init__(self, weight: KeptWeight, is_fixed: bool = False) -> None:
        self.rows = KeptEmbedding(weight)
        self.head = make_triton(weight, is_fixed=is_fixed)


class PlanesEmbedding:
    """Rows of the matrix of a linear in planes of codes."""

    matrix = None

    def __init__(self, linear: PlanesLinear) -> None:
        self._linear = linear

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._linear.take_rows(token_ids)


class PlanesTiedEmbedding:
    """One matrix in planes of codes, read by rows and as a linear layer."""

    rows: Embedding
    head: Head

    def __init__(self, weight: KeptWeight) -> None:
        self.head = linear = PlanesLinear(weight)
        self.rows = PlanesEmbedding(linear)


def make_packed_tied(weight: KeptWeight) -> TiedEmbedding:
    kind = kind_of(weight)
    return KeptTiedEmbedding(weight) if kind is None or kind.levels else PlanesTiedEmbedding(weight)


def _kept(shape: Shape) -> bool:
    return bool(shape.get("kept", False))


def _plain(shape: Shape) -> bool:
    return not _kept(shape)


VERSIONS = (
    Version(
        op="embedding",
        name="kept",
        make=KeptEmbedding,
        when="for a quantised matrix: rows are dequantised as they are read",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        invariant_on=("cuda",),
        fits=_kept,
        missing=triton_missing,
    ),
    Version(
        op="embedding",
        name="native",
        make=lambda weight: NativeEmbedding(StoredLinear(weight)),
        when="for a stored matrix: rows are unpacked as they are read",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        fits=lambda shape: bool(shape.get("stored", False)),
        missing=native_missing,
    ),
    Version(
        op="embedding",
        name="torch",
        make=PlainEmbedding,
        when="for a plain matrix: copies the tokens' rows",
        invariant_on=("cpu", "cuda"),
        fits=_plain,
    ),
)

TIED_VERSIONS = (
    Version(
        op="tied_embedding",
        name="planes",
        make=make_packed_tied,
        when="as kept; GGUF matrices in planes of codes, which the LM head multiplies by the matrix instruction",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        fits=_kept,
        missing=packed_missing,
    ),
    Version(
        op="tied_embedding",
        name="kept",
        make=KeptTiedEmbedding,
        when="one quantised matrix; rows and tiles of the LM head are dequantised in registers",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        fits=_kept,
        missing=triton_missing,
    ),
    Version(
        op="tied_embedding",
        name="kept_fixed",
        make=partial(KeptTiedEmbedding, is_fixed=True),
        when="as kept, with one tile size, so that the batch cannot change a token's result",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        invariant_on=("cuda",),
        fits=_kept,
        missing=triton_missing,
    ),
    Version(
        op="tied_embedding",
        name="native",
        make=NativeTiedEmbedding,
        when="C++: one packed matrix for both the lookup and the LM head",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="tied_embedding",
        name="tuned",
        make=lambda weight: PlainTiedEmbedding(weight, TunedLinear),
        when="one plain matrix; the LM head is the tuned linear",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=_plain,
        missing=hopper_missing,
    ),
    Version(
        op="tied_embedding",
        name="reference",
        make=PlainTiedEmbedding,
        when="the reference: one plain matrix; the LM head is torch's linear",
        fits=_plain,
    ),
    Version(
        op="tied_embedding",
        name="tiles",
        make=lambda weight: PlainTiedEmbedding(weight, lambda plain: TiledLinear(PlainLinear(plain))),
        when="the reference with the LM head in fixed tiles of rows: same sums whatever the batch",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
    Version(
        op="tied_embedding",
        name="invariant",
        make=lambda weight: PlainTiedEmbedding(weight, InvariantLinear),
        when="one plain matrix; the LM head is the invariant linear: same sums whatever the batch",
        devices=("cuda",),
        fits=_plain,
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
)
