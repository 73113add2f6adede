"""The gated activation of an MLP: act(gate) · up, where `gate_up` holds both halves side by side.

gated: make(kind) -> function (gate_up [T, 2 I]) -> [T, I]. A CUDA version also takes `quantise=True`, which returns a
`Quantised` for an FP8 linear.
activation: make(kind) -> function (up [T, I]) -> [T, I], the activation alone
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.activation_kind import Activation
from millrace.ops.base.quantised import Quantised
from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, native, native_missing
from millrace.ops.triton import triton_missing

Gated = Callable[[Tensor], Tensor]

ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""Codes of the C++ kernels; the same as in cpp/activation.h."""


def gated_reference(gate_up: Tensor, kind: Activation) -> Tensor:
    """Computed in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (activate(gate, kind) * up).to(gate_up.dtype)


def activate(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind in ("relu", "relu2"):
        return F.relu(x) if kind == "relu" else F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def make_reference(kind: Activation) -> Gated:
    return lambda gate_up: gated_reference(gate_up, kind)


def make_plain(kind: Activation) -> Callable[[Tensor], Tensor]:
    """Computed in float32, rounded once."""
    return lambda up: activate(up.float(), kind).to(up.dtype)


def make_by_rows(kind: Activation) -> Callable[[Tensor], Tensor]:
    plain = make_plain(kind)
    return lambda up: torch.stack([plain(row) for row in up]) if len(up) else up


def make_native_plain(kind: Activation) -> Callable[[Tensor], Tensor]:
    gated = make_native(kind)
    return lambda up: gated(torch.cat((up, torch.ones_like(up)), dim=1))


def make_torch(kind: Activation) -> Gated:
    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, kind).mul_(up)

    return gated


def make_native(kind: Activation) -> Gated:
    kernels, code = native(), ACTIVATION_CODES[kind]

    def gated(gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        kernels.for_rows(rows).gated(DTYPES[gate_up.dtype], code, gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    return gated


def make_triton(kind: Activation) -> Callable[..., Tensor | Quantised]:
    from millrace.ops.triton.activation import gated as launch

    def gated(gate_up: Tensor, quantise: bool = False) -> Tensor | Quantised:
        values, scales = launch(gate_up, kind, quantise)
        return values if scales is None else Quantised(values, scales)

    return gated


VERSIONS = (
    Version(
        op="gated",
        name="native",
        make=make_native,
        when="C++: one pass, in float32, rounded once",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="gated",
        name="triton",
        make=make_triton,
        when="one kernel, in float32, rounded once",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="gated",
        name="torch",
        make=make_torch,
        when="two elementwise passes; the activation is rounded to the model's dtype before the product",
        invariant_on=("cpu", "cuda"),
    ),
    Version(
        op="gated",
        name="reference",
        make=make_reference,
        when="the reference: everything in float32",
        invariant_on=("cpu", "cuda"),
    ),
)

_EXACT: frozenset[Activation] = frozenset(("relu", "relu2"))
"""Activations that torch computes alike for all items."""

PLAIN_VERSIONS = (
    Version(
        op="activation",
        name="native",
        make=make_native_plain,
        when="C++: the gated activation with a factor of one",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        fits=lambda shape: shape.get("kind", "silu") in ACTIVATION_CODES,
        missing=native_missing,
    ),
    Version(
        op="activation",
        name="torch",
        make=make_plain,
        when="in float32, rounded once; ReLU and its square on any device",
        invariant_on=("cpu", "cuda"),
        fits=lambda shape: shape.get("kind", "silu") in _EXACT,
    ),
    Version(
        op="activation",
        name="elementwise",
        make=make_plain,
        when="in float32, rounded once",
        devices=("cuda",),
        invariant_on=("cuda",),
    ),
    Version(
        op="activation",
        name="reference",
        make=make_by_rows,
        when="the reference, token by token: torch rounds items that fill a vector unlike those left over",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
)
