"""Products of many rows and fused gated MLPs: bit-identical to few rows and separate ops."""

from __future__ import annotations

import ctypes

import pytest
import torch
from helpers.stored_blocks import random_blocks

from millrace.ops.base.activation_kind import Activation
from millrace.ops.cpp.native import native, native_missing
from millrace.ops.elementwise.activation import ACTIVATION_CODES
from millrace.ops.elementwise.activation import VERSIONS as GATED
from millrace.ops.linear.dense import NativeLinear, NativeParts
from millrace.ops.linear.stored import StoredLinear, StoredPart, StoredWeight, pack_stored

pytestmark = pytest.mark.skipif(bool(native_missing(torch.device("cpu"))), reason="no native kernels here")

MANY = 65
"""The smallest number of rows that uses the kernels for many rows."""


def plain(outputs: int, inputs: int, with_bias: bool = False) -> NativeLinear:
    torch.manual_seed(outputs + inputs)
    bias = torch.randn(outputs).bfloat16() if with_bias else None
    return NativeLinear((torch.randn(outputs, inputs) * 0.1).bfloat16(), bias)


def stored(kinds: list[str], sizes: list[int], inputs: int, with_bias: bool = False) -> StoredLinear:
    parts = tuple(
        StoredPart(kind, n, pack_stored(kind, random_blocks(kind, n, inputs, n), n, inputs))
        for kind, n in zip(kinds, sizes, strict=True)
    )
    bias = torch.randn(sum(sizes)).bfloat16() if with_bias else None
    return StoredLinear(StoredWeight(parts, inputs, torch.bfloat16), bias)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [MANY, 160, 161, 1100])
def test_many_rows_equal_single_rows(rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layers: list[NativeParts] = [
            plain(40, 50, with_bias=True),
            plain(97, 576),
            stored(["Q4_1"], [49], 64, with_bias=True),
            stored(["Q4_K", "Q6_K", "Q6_K"], [33, 64, 1], 256, with_bias=True),
            stored(["Q8_0"], [70], 2048),
            plain(70, 1700, with_bias=True),
        ]
        for layer in layers:
            x = torch.randn(rows, layer.in_features).bfloat16()
            some = torch.cat([layer(x[i : i + 30]) for i in range(0, rows, 30)])
            assert torch.equal(layer(x), some), layer.in_features
            wide = torch.cat([layer.wide(x[i : i + 30]) for i in range(0, rows, 30)])
            assert torch.equal(layer.wide(x), wide), layer.in_features
    finally:
        torch.set_num_threads(before)
        native()


def gated_mlp(gate_up: NativeParts, down: NativeParts, kind: Activation, x: torch.Tensor) -> torch.Tensor | None:
    out = torch.empty(x.shape[0], down.out_features, dtype=x.dtype)
    at = (ctypes.addressof(gate_up.native), ctypes.addressof(down.native), ACTIVATION_CODES[kind])
    done = native().without_gil.gated_mlp(*at, x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0])
    return out if done else None


def separate_ops(gate_up: NativeParts, down: NativeParts, kind: Activation, x: torch.Tensor) -> torch.Tensor:
    gated = next(version for version in GATED if version.name == "native").make(kind)
    return down(gated(gate_up(x)))


@pytest.mark.parametrize("kind", sorted(ACTIVATION_CODES))
@pytest.mark.parametrize("rows", [MANY, 192, 333])
def test_fused_gated_mlp_equals_separate_ops(rows: int, kind: Activation) -> None:
    if not native().with_gil.has_amx():
        pytest.skip("this machine has no matrix unit")
    pairs: list[tuple[NativeParts, NativeParts]] = [
        (plain(192, 96, with_bias=True), plain(50, 96, with_bias=True)),
        (plain(64, 40), plain(40, 32)),
        (stored(["Q4_1", "Q4_1"], [96, 96], 64, with_bias=True), stored(["Q6_K"], [64], 256)),
        (stored(["Q4_1", "Q4_1"], [96, 96], 64, with_bias=True), stored(["Q8_0"], [33], 96, with_bias=True)),
        (stored(["Q5_0"], [512], 64), stored(["Q4_K", "Q6_K"], [48, 16], 256)),
    ]
    for gate_up, down in pairs:
        x = torch.randn(rows, gate_up.in_features).bfloat16()
        found = gated_mlp(gate_up, down, kind, x)
        if gate_up.out_features != 2 * down.in_features:
            assert found is None
            continue
        assert found is not None
        assert torch.equal(found, separate_ops(gate_up, down, kind, x)), (gate_up.out_features, down.in_features)


def test_fused_gated_mlp_with_more_inputs_than_fit_into_cache() -> None:
    if not native().with_gil.has_amx():
        pytest.skip("this machine has no matrix unit")
    pairs: list[tuple[NativeParts, NativeParts]] = [
        (stored(["Q4_1", "Q4_1"], [608, 608], 1056, with_bias=True), stored(["Q4_0"], [48], 608)),
        (plain(1216, 1030), plain(48, 608, with_bias=True)),
    ]
    x = torch.randn(600, 1056).bfloat16()
    for gate_up, down in pairs:
        rows = x[:, : gate_up.in_features]
        found = gated_mlp(gate_up, down, "silu", rows)
        assert found is not None
        assert torch.equal(found, separate_ops(gate_up, down, "silu", rows)), gate_up.in_features


def test_gated_mlp_is_not_fused_if_layers_do_not_fit() -> None:
    x = torch.randn(200, 64).bfloat16()
    few = (stored(["Q4_1"], [192], 64), stored(["Q4_1"], [64], 96))
    assert gated_mlp(*few, "silu", x[:3]) is None
    for gate_up, down in (
        (stored(["Q4_1", "Q4_0"], [96, 96], 64), stored(["Q4_1"], [64], 96)),  # two formats
        (stored(["Q4_1"], [192], 64), plain(64, 96)),  # quantised and plain
        (plain(80, 64), plain(64, 40)),  # not whole tiles
    ):
        assert gated_mlp(gate_up, down, "silu", x) is None
