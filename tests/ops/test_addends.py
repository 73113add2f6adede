"""Linears whose sums start from an addend: every version against float64, alone and in the gated forms."""

from __future__ import annotations

import pytest
import torch
from helpers.stored_blocks import dequantised, random_blocks
from helpers.triton_mode import device, interpreted
from torch import Tensor

from millrace.ops.base.quantised import quantise_rows, quantise_weight, with_quantise
from millrace.ops.cpp.native import native_missing
from millrace.ops.elementwise.activation import gated_reference
from millrace.ops.linear import dense
from millrace.ops.linear.fp8 import Fp8Invariant, Fp8Reference, Fp8Tuned
from millrace.ops.linear.gated import ComposedGatedLinear, GatedLinear, TunedFp8GatedLinear, TunedGatedLinear
from millrace.ops.linear.stored import StoredLinear, StoredPart, StoredWeight, pack_stored
from millrace.ops.triton.gemm.choice import NO_TILES, Fp8Tiles, TilesByRows
from millrace.ops.triton.gemm.product import Tiles

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HALF = torch.float16 if interpreted else torch.bfloat16  # the interpreter cannot multiply bfloat16
ROWS, K, N = 5, 64, 128
TILES = TilesByRows((99,), (Tiles("dot", 16, 32, 32, stages=2),))


def tensors(dtype: torch.dtype, place: torch.device = CPU) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, and an addend larger than the product."""
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, K), torch.randn(N, K) * 0.1
    bias, addend = torch.randn(N), 8 * torch.randn(ROWS, N)
    return x.to(place, dtype), weight.to(place, dtype), bias.to(place, dtype), addend.to(place, dtype)


def check(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def expected_sums(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
    return addend.double() + x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_bias", [True, False])
def test_every_cpu_version(with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, given, addend = tensors(dtype)
    bias, kept = given if with_bias else None, addend.clone()
    shape, checked = {"in_features": K, "out_features": N}, []
    for version in dense.VERSIONS:
        if not version.reject_reason(CPU, dtype, False, shape):
            found = version.make(weight, bias)(x, addend)
            assert found.dtype == dtype
            check(found, expected_sums(x, weight, bias, addend), TOLERANCE[dtype])
            checked.append(version.name)
    assert torch.equal(addend, kept)
    assert {"reference", "tiles"} <= set(checked)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gpu_versions(with_bias: bool) -> None:
    x, weight, given, addend = tensors(HALF, device)
    bias, kept = given if with_bias else None, addend.clone()
    for layer in (
        dense.TunedLinear(weight, bias, TILES),
        dense.TunedLinear(weight, bias, NO_TILES),
        dense.InvariantLinear(weight, bias),
    ):
        found = layer(x, addend)
        assert found.dtype == HALF
        check(found, expected_sums(x, weight, bias, addend), TOLERANCE[HALF])
    assert torch.equal(addend, kept)


@pytest.mark.parametrize("version", [Fp8Reference, Fp8Invariant, Fp8Tuned])
def test_fp8_versions(version: type[Fp8Reference]) -> None:
    x, weight, bias, addend = tensors(torch.bfloat16, device)
    layer = Fp8Tuned(weight, bias, Fp8Tiles(TILES)) if version is Fp8Tuned else version(weight, bias)
    narrow, widened = quantise_rows(x), quantise_weight(weight).widen()
    found = layer(narrow, addend)
    assert found.dtype == torch.bfloat16
    # The interpreter rounds a float32 sum to bfloat16 towards zero.
    check(found, expected_sums(narrow.widen(), widened, bias, addend), 3e-2 if interpreted else 2e-2)


def test_stored_weights() -> None:
    if native_missing(CPU):
        pytest.skip("there are no native kernels here")
    x, _, bias, addend = tensors(torch.bfloat16)
    blocks = random_blocks("Q8_0", N, K)
    packed = StoredPart("Q8_0", N, pack_stored("Q8_0", blocks, N, K))
    layer = StoredLinear(StoredWeight((packed,), K, torch.bfloat16), bias)
    weight = dequantised("Q8_0", blocks, K, torch.bfloat16)
    check(layer(x, addend), expected_sums(x, weight, bias, addend), TOLERANCE[torch.bfloat16])


def expected_gated(sums: Tensor) -> Tensor:
    gate, up = sums.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def test_gated_versions_add_before_the_activation() -> None:
    gated = with_quantise(lambda gate_up: gated_reference(gate_up, "silu"))
    x, weight, bias, addend = tensors(HALF, device)
    layers: list[GatedLinear] = [
        ComposedGatedLinear(weight, bias, "silu", dense.PlainLinear, gated),
        TunedGatedLinear(weight, bias, "silu", dense.PlainLinear, gated, TILES),
    ]
    wanted = expected_gated(expected_sums(x, weight, bias, addend))
    for layer in layers:
        check(layer(x, addend=addend), wanted, 2 * TOLERANCE[HALF])
        quantised = layer(x, quantise=True, addend=addend).widen().double()
        assert ((quantised - wanted).norm() / wanted.norm()).item() < 0.05


def test_the_gated_fp8_version_adds_before_the_activation() -> None:
    gated = with_quantise(lambda gate_up: gated_reference(gate_up, "silu"))
    x, weight, bias, addend = tensors(torch.bfloat16, device)
    layer = TunedFp8GatedLinear(weight, bias, "silu", lambda own, b: Fp8Tuned(own, b, Fp8Tiles(TILES)), gated, TILES)
    narrow, widened = quantise_rows(x), quantise_weight(weight).widen()
    wanted = expected_gated(expected_sums(narrow.widen(), widened, bias, addend))
    found = layer(narrow, addend=addend).double()
    assert ((found - wanted).norm() / wanted.norm()).item() < 2e-2
