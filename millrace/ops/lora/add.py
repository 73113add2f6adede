"""add_lora: out [T, N] += scale · (x Aᵀ) B for each token, with the matrices in the token's slot.

make() -> function (x [T, K], slots int32 [T], table, out [T, N]). Slot 0 adds nothing. Sums are in float32 and `out` is
rounded once. A token's result does not depend on the other tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, native, native_missing
from millrace.ops.lora.weights import MAX_PARTS, LoraTable
from millrace.ops.triton import triton_missing

AddLora = Callable[[Tensor, Tensor, LoraTable, Tensor], None]


def add_lora(x: Tensor, slots: Tensor, table: LoraTable, out: Tensor) -> None:
    """The reference: one slot after the other."""
    for slot in torch.unique(slots).tolist():
        rows = (slots == slot).nonzero()[:, 0]
        for first, end, a, b, scale in table.parts(slot):
            added = (x[rows].float() @ a.float().t()) @ b.float() * scale
            out[rows, first:end] = (out[rows, first:end].float() + added).to(out.dtype)


class NativeAddLora:
    """C++: runs of tokens with the same slot share each read of its matrices."""

    def __init__(self) -> None:
        self._add = native().without_gil.add_lora

    def __call__(self, x: Tensor, slots: Tensor, table: LoraTable, out: Tensor) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        self._add(
            *(DTYPES[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), x.shape[0]),
            *(slots.data_ptr(), table.a.data_ptr(), table.b.data_ptr(), table.ranks.data_ptr()),
            *(table.scales.data_ptr(), table.sizes.data_ptr(), MAX_PARTS, table.in_features),
        )


def make_triton(most_rows: int | None = None) -> AddLora:
    """`most_rows`: more tokens are multiplied in tiles; None: as many as is fastest."""
    from millrace.ops.triton.lora import MOST_ROWS  # local: imports Triton
    from millrace.ops.triton.lora import add_lora as triton_add_lora

    most = MOST_ROWS if most_rows is None else most_rows

    def add(x: Tensor, slots: Tensor, table: LoraTable, out: Tensor) -> None:
        tables = (table.a, table.b, table.ranks, table.scales)
        triton_add_lora(x, slots, tables, table.in_features, table.out_sizes, out, most)

    return add


def make_triton_by_row() -> AddLora:
    return make_triton(sys.maxsize)


VERSIONS = (
    Version(
        op="add_lora",
        name="native",
        make=NativeAddLora,
        when="C++: neighbouring tokens with one adapter share each read of its matrices",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="add_lora",
        name="triton",
        make=make_triton,
        when="Triton: tokens of prompts share each read of their matrices; any mix of adapters in one captured step",
        devices=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="add_lora",
        name="triton_by_row",
        make=make_triton_by_row,
        when="Triton: each token reads its own matrices",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="add_lora",
        name="reference",
        make=lambda: add_lora,
        when="the reference: one adapter after the other",
    ),
)
