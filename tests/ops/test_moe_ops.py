"""Routing and experts against a plain loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.base.activation_kind import ClampedSwiglu, ExpertActivation
from millrace.ops.elementwise.activation import gated_reference
from millrace.ops.linear.dense import NativeLinear, PlainLinear
from millrace.ops.moe.experts import DenseExperts, ExpertWeights, GroupedExperts, LoopExperts, NativeExperts, gate
from millrace.ops.moe.router import route


def plain(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            gate_up, down = (part.double() for part in pairs[expert])
            out[token] += weight * (gated_reference(x[token].double() @ gate_up.T, "silu").double() @ down.T)
    return out


@settings(max_examples=examples(20))
@given(
    tokens=st.integers(1, 30),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    renormalise=st.booleans(),
    make=st.sampled_from([LoopExperts, NativeExperts, DenseExperts]),
    linear=st.sampled_from([PlainLinear, NativeLinear]),
)
def test_experts(
    tokens: int, num_experts: int, top_k: int, renormalise: bool, make: type, linear: Callable[..., object]
) -> None:
    torch.manual_seed(tokens * 10 + num_experts)
    pairs = [(torch.randn(24, 10) * 0.3, torch.randn(10, 12) * 0.3) for _ in range(num_experts)]
    x = torch.randn(tokens, 10)
    weights, ids = route(torch.randn(tokens, num_experts), min(top_k, num_experts), renormalise)
    experts = make(ExpertWeights(num_experts, iter(pairs)), "silu", linear)
    found = experts(x, weights, ids)
    torch.testing.assert_close(found.double(), plain(x, weights, ids, pairs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [LoopExperts, NativeExperts, DenseExperts])
def test_biases_and_a_clamped_activation(make: type) -> None:
    torch.manual_seed(3)
    linear = NativeLinear if make is NativeExperts else PlainLinear
    pairs = [(torch.randn(24, 10), torch.randn(10, 12)) for _ in range(4)]
    biases, x = (torch.randn(4, 24), torch.randn(4, 10)), torch.randn(9, 10)
    weights, ids = route(torch.randn(9, 4), 2, True)
    experts = make(ExpertWeights(4, iter(pairs), biases), ClampedSwiglu(slope=1.7, limit=2.0), linear)
    wanted = torch.zeros(9, 10)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            left, up = (x[token] @ pairs[expert][0].T + biases[0][expert]).chunk(2)
            inner = left.clamp(max=2.0) / (1 + torch.exp(-1.7 * left.clamp(max=2.0))) * (up.clamp(-2.0, 2.0) + 1)
            wanted[token] += weights[token, place] * (inner @ pairs[expert][1].T + biases[1][expert])
    torch.testing.assert_close(experts(x, weights, ids), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_grouped_experts_on_a_gpu() -> None:
    torch.manual_seed(0)
    pairs = [
        (torch.randn(64, 32).cuda().bfloat16() * 0.3, torch.randn(32, 32).cuda().bfloat16() * 0.3) for _ in range(7)
    ]
    x = torch.randn(50, 32).cuda().bfloat16()
    weights, ids = route(torch.randn(50, 7).cuda(), 3, True)
    found = GroupedExperts(ExpertWeights(7, iter(pairs)), "silu", PlainLinear)(x, weights, ids)
    expected = plain(x, weights, ids, pairs)
    assert (found.double() - expected).norm() / expected.norm() < 0.02


def test_route_weights() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    shares = torch.softmax(logits, dim=-1)
    weights, ids = route(logits, 2, renormalise=False)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, shares[:, [2, 1]])
    weights, _ = route(logits, 2, renormalise=True)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    torch.testing.assert_close(weights[0, 0] / weights[0, 1], shares[0, 2] / shares[0, 1])


@pytest.mark.parametrize(
    ("make", "activation"),
    [(LoopExperts, "silu"), (NativeExperts, "silu"), (NativeExperts, "gelu"), (NativeExperts, ClampedSwiglu(1.7, 7.0))],
)
def test_experts_do_not_depend_on_the_batch(make: type, activation: ExpertActivation) -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        pairs = [(torch.randn(64, 48).to(dtype), torch.randn(48, 32).to(dtype)) for _ in range(5)]
        experts = make(ExpertWeights(5, pairs), activation, NativeLinear)
        x = torch.randn(60, 48).to(dtype)
        weights, ids = route(torch.randn(60, 5), 2, True)
        whole = experts(x, weights, ids)
        for first, count in ((0, 1), (7, 2), (20, 40)):
            part = slice(first, first + count)
            assert torch.equal(experts(x[part], weights[part], ids[part]), whole[part])


@pytest.mark.parametrize("inner", [32, 80])
def test_the_clamped_activation_of_a_token_does_not_depend_on_the_batch(inner: int) -> None:
    """Torch computes the last 16 of 80 numbers with other instructions than the others."""
    torch.manual_seed(0)
    x, activation = torch.randn(7, 2 * inner), ClampedSwiglu(1.702, 7.0)
    whole = gate(x, activation)
    for count in (1, 3):
        parts = [gate(x[first : first + count].clone(), activation) for first in range(0, 7, count)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_experts_in_one_call_are_those_one_after_the_other(rows: int, dtype: torch.dtype) -> None:
    """Up to the rounding between the activation and its product, which the call does once, in float32."""
    torch.manual_seed(4)
    pairs = [(torch.randn(160, 48).to(dtype), (torch.randn(48, 80) * 0.1).to(dtype)) for _ in range(5)]
    biases = (torch.randn(5, 160).to(dtype), torch.randn(5, 48).to(dtype))
    x, activation = torch.randn(rows, 48).to(dtype), ClampedSwiglu(1.702, 7.0)
    weights, ids = route(torch.randn(rows, 5), 3, True)
    found, wanted = (
        make(ExpertWeights(5, pairs, biases), activation, NativeLinear)(x, weights, ids)
        for make in (NativeExperts, LoopExperts)
    )
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
