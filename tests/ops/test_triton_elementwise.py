"""Norms, gated activation and QKV preparation in Triton against their torch references, with and without FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.attention.qkv import TorchPrepareQkv, make_triton
from millrace.ops.base.quantised import Quantised
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.elementwise.activation import gated_reference
from millrace.ops.elementwise.activation import make_triton as make_gated
from millrace.ops.elementwise.norm import (
    TritonAddRmsNorm,
    add_rms_norm,
    add_rms_norm_of,
    make_triton_rms_norm,
    rms_norm,
)
from millrace.ops.triton import norm
from millrace.ops.triton.attention.qkv import PrepareQkvKernel, Shape, shape_for

HALF = torch.float16 if interpreted else torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def back(quantised: Quantised) -> torch.Tensor:
    return quantised.values.float() * quantised.scales[:, None]


@pytest.mark.parametrize("dim", [1, 7, 64, 576, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms(dim: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(3, dim, dtype=dtype), random(3, dim, dtype=dtype), random(dim)
    close(make_triton_rms_norm()(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    normed, total = TritonAddRmsNorm()(x, residual, weight, 1e-5)
    expected, sums = add_rms_norm(x, residual, weight, 1e-5)
    close(normed, expected)
    assert torch.equal(total, sums)


def test_norms_do_not_depend_on_the_rows_per_program() -> None:
    x, residual, weight = random(7, 576, dtype=HALF), random(7, 576, dtype=HALF), random(576)
    alone = norm.add_rms_norm(x, residual, weight, 1e-5, shape=norm.Shape(1, 4))
    together = norm.add_rms_norm(x, residual, weight, 1e-5, shape=norm.Shape(2, 4))
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[2], together[2])
    few, many = norm.shape_for(4096, 1), norm.shape_for(4096, 8192)
    assert few.warps == many.warps, "a row's sum does not depend on the number of rows"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_of_some_rows(dtype: torch.dtype) -> None:
    x, residual, weight = random(9, 72, dtype=dtype), random(9, 72, dtype=dtype), random(72)
    index = torch.tensor([8, 0, 3, 3], dtype=torch.int32, device=device)
    for version in (TritonAddRmsNorm(), add_rms_norm):
        out = torch.full((4, 72), float("nan"), dtype=dtype, device=device)
        assert add_rms_norm_of(version, x, residual, weight, 1e-5, index, out) is out
        assert torch.equal(out, version(x, residual, weight, 1e-5)[0][index.long()])


def unsummed(tokens: int, choices: int, dim: int, dtype: torch.dtype) -> tuple[Unsummed, torch.Tensor]:
    """Unsummed expert outputs, and their sum."""
    outputs, weights = random(tokens * choices, dim, dtype=dtype), torch.rand(tokens, choices, device=device)
    counters = torch.full((2, 5), 7, dtype=torch.int32, device=device)
    total = (outputs.view(tokens, choices, dim).float() * weights[..., None]).sum(dim=1).to(dtype)
    return Unsummed(outputs, weights, counters), total


@pytest.mark.parametrize(("tokens", "choices", "dim"), [(1, 1, 8), (5, 3, 72), (3, 8, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_add_unsummed_expert_outputs(tokens: int, choices: int, dim: int, dtype: torch.dtype) -> None:
    residual, weight = random(tokens, dim, dtype=dtype), random(dim)
    parts, total = unsummed(tokens, choices, dim, dtype)
    assert tuple(parts.shape) == tuple(total.shape)
    normed, sums = TritonAddRmsNorm()(parts, residual, weight, 1e-5)
    assert not bool(parts.counters.any())
    close(normed, add_rms_norm(total, residual, weight, 1e-5)[0])
    close(sums, total + residual)
    parts.counters.fill_(1)
    close(make_triton_rms_norm()(parts, weight, 1e-5), rms_norm(total, weight, 1e-5))
    assert not bool(parts.counters.any())
    out = torch.full((2, dim), float("nan"), dtype=dtype, device=device)
    index = torch.tensor([tokens - 1, 0], dtype=torch.int32, device=device)
    assert torch.equal(TritonAddRmsNorm().of(parts, residual, weight, 1e-5, index, out), normed[index.long()])


def test_norm_of_a_view_with_gaps() -> None:
    x, weight = random(5, 96, dtype=HALF)[:, :64], random(64)
    close(make_triton_rms_norm()(x, weight, 1e-6), rms_norm(x, weight, 1e-6))


@pytest.mark.skipif(interpreted, reason="Triton's interpreter rounds to FP8 differently")
@pytest.mark.parametrize("dim", [64, 576, 14336])
def test_fp8_rows_are_within_half_a_step(dim: int) -> None:
    x, weight = random(9, dim, dtype=HALF) * 5, random(dim)
    normed = rms_norm(x, weight, 1e-5).float()
    found = make_triton_rms_norm()(x, weight, 1e-5, quantise=True)
    assert isinstance(found, Quantised)
    assert ((back(found) - normed).norm() / normed.norm()).item() < 0.04
    torch.testing.assert_close(found.scales, normed.abs().amax(dim=1) / 448, rtol=2e-2, atol=0)
    gate_up = random(9, 2 * dim, dtype=HALF)
    product = gated_reference(gate_up, "silu").float()
    quantised = make_gated("silu")(gate_up, quantise=True)
    assert isinstance(quantised, Quantised)
    assert ((back(quantised) - product).norm() / product.norm()).item() < 0.04


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("inner", [1, 33, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gated(kind: Any, inner: int, dtype: torch.dtype) -> None:
    gate_up = random(4, 2 * inner, dtype=dtype) * 3
    close(make_gated(kind)(gate_up), gated_reference(gate_up, kind))


@pytest.mark.parametrize("rotary", [None, 16, 8, 6])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (1, 1)])
def test_qkv(rotary: int | None, normed: bool, heads: int, kv_heads: int) -> None:
    head_dim, block_size, tokens = 16, 4, 5
    norms = (random(head_dim), random(head_dim)) if normed else (None, None)
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=HALF)
    angles = None if rotary is None else random(tokens, rotary)
    kv = random(2, 6, kv_heads, block_size, head_dim, dtype=HALF)
    expected_kv = kv.clone()
    blocks = torch.tensor([1, 1, 5, 3, 2], device=device)
    offsets = torch.tensor([0, 3, 2, 1, 0], device=device)
    arguments = (heads, kv_heads, head_dim, 1e-6, *norms)
    expected = TorchPrepareQkv(*arguments)(qkv.clone(), angles, expected_kv, blocks, offsets)
    found = make_triton(*arguments)(qkv, angles, kv, blocks, offsets)
    close(found, expected)
    close(kv, expected_kv)


def test_qkv_results_do_not_depend_on_the_heads_per_program() -> None:
    qkv, angles = random(3, 6 * 64, dtype=HALF), random(3, 64)
    places = (torch.tensor([1, 2, 3], device=device), torch.tensor([0, 15, 7], device=device))
    prepare = PrepareQkvKernel(4, 1, 64, 1e-6, None, None)
    results = []
    for shape in (None, Shape(2, 1), Shape(8, 8)):
        kv = torch.zeros(2, 4, 1, 16, 64, dtype=HALF, device=device)
        results.append((prepare(qkv.clone(), angles, kv, *places, shape), kv))
    for queries, kv in results[1:]:
        assert torch.equal(queries, results[0][0])
        assert torch.equal(kv, results[0][1])
    assert shape_for(8192, 48, False) != shape_for(8, 48, False)
    assert shape_for(8192, 48, True) == shape_for(8, 48, True), (
        "the sum of a normed head does not depend on the number of tokens"
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_qkv_head_sizes(head_dim: int) -> None:
    qkv, angles = random(3, 6 * head_dim, dtype=HALF), random(3, head_dim)
    kv = random(2, 4, 1, 16, head_dim, dtype=HALF)
    expected_kv = kv.clone()
    places = (torch.tensor([1, 2, 3], device=device), torch.tensor([0, 15, 7], device=device))
    norms = (random(head_dim), random(head_dim))
    expected = TorchPrepareQkv(4, 1, head_dim, 1e-6, *norms)(qkv.clone(), angles, expected_kv, *places)
    close(make_triton(4, 1, head_dim, 1e-6, *norms)(qkv, angles, kv, *places), expected)
    close(kv, expected_kv)
