"""Experts that stay as they are stored on a GPU, against experts of their dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.stored_blocks import random_blocks
from helpers.triton_mode import device, interpreted

from millrace.errors import ModelError
from millrace.ops.base.activation_kind import ClampedSwiglu, ExpertActivation
from millrace.ops.linear.block_weight import BlockWeight
from millrace.ops.linear.dense import PlainLinear
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.moe.experts import ExpertWeights, LoopExperts
from millrace.ops.moe.stored_experts import Stack, StoredExperts

DTYPE = torch.float16 if interpreted else torch.bfloat16
EXPERTS, HIDDEN, INNER = 3, 64, 32
FP8 = torch.float8_e4m3fn


def grouped(kind: str, rows: int, columns: int, seed: int) -> GroupedWeight:
    torch.manual_seed(seed)
    scales = (torch.rand(rows, columns // 32) + 0.1) * 0.02
    four = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    weight = GroupedWeight(four, scales.half(), columns, 32, DTYPE, zero=8)
    changes: dict[str, dict[str, Any]] = {
        "zeros": {"zeros": torch.randint(0, 16, scales.shape, dtype=torch.uint8)},
        "mxfp4": {
            "levels": torch.linspace(-1, 1, 16),
            "zero": 0,
            "scales": torch.randint(118, 124, scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        },
        "fp8_outputs": {
            "codes": torch.randn(rows, columns).to(FP8),
            "zero": 0,
            "group": columns,
            "scales": torch.rand(rows, 1) * 0.1,
        },
        "fp8_blocks": {
            "codes": torch.randn(rows, columns).to(FP8),
            "zero": 0,
            "rows_per_scale": 32,
            "scales": torch.rand(-(-rows // 32), columns // 32) * 0.1,
        },
        "fp8_odd_blocks": {
            "codes": torch.randn(rows, columns).to(FP8),
            "zero": 0,
            "rows_per_scale": 48,
            "scales": torch.rand(-(-rows // 48), columns // 32) * 0.1,
        },
    }
    return replace(weight, **changes.get(kind, {})).to(device)


def weight_of(kind: str, rows: int, columns: int, seed: int) -> GroupedWeight | BlockWeight:
    if not kind.startswith(("Q", "IQ")):
        return grouped(kind, rows, columns, seed)
    blocks = random_blocks(kind, rows, columns, seed, scale=0.0005 if kind.endswith("_K") else 0.005)
    return BlockWeight(kind, torch.from_numpy(blocks).to(device), columns, DTYPE)


def both(
    kind: str, hidden: int, inner: int, is_fixed: bool = False, activation: ExpertActivation = "silu"
) -> tuple[StoredExperts, LoopExperts]:
    pairs = [
        (weight_of(kind, 2 * inner, hidden, 2 * expert), weight_of(kind, hidden, inner, 2 * expert + 1))
        for expert in range(EXPERTS)
    ]
    plain = [tuple(weight.dequantised().to(DTYPE) for weight in pair) for pair in pairs]
    biases = None
    if activation != "silu":
        sizes = ((EXPERTS, 2 * inner), (EXPERTS, hidden))
        biases = tuple((torch.randn(size) * 0.3).to(device, DTYPE) for size in sizes)
    stored = StoredExperts(ExpertWeights(EXPERTS, iter(pairs), biases), activation, PlainLinear, is_fixed)  # type: ignore[arg-type]
    return stored, LoopExperts(ExpertWeights(EXPERTS, plain, biases), activation, PlainLinear)  # type: ignore[arg-type]


def check(
    kind: str, tokens: int, hidden: int = HIDDEN, inner: int = INNER, activation: ExpertActivation = "silu"
) -> None:
    stored, loop = both(kind, hidden, inner, activation=activation)
    torch.manual_seed(5)
    x = torch.randn(tokens, hidden).to(device, DTYPE)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(tokens)]).to(device)
    weights = torch.rand(tokens, 2, device=device)
    found, wanted = stored(x, weights, ids).float(), loop(x, weights, ids).float()
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2
    assert torch.equal(stored(x, weights, ids).float(), found), "the counts are those of this call"


@pytest.mark.parametrize("kind", ["plain", "zeros", "mxfp4", "fp8_outputs", "fp8_blocks", "fp8_odd_blocks", "Q5_0"])
def test_every_kind_of_weight(kind: str) -> None:
    check(kind, 3)


def test_biases_and_a_clamped_activation() -> None:
    check("mxfp4", 5, activation=ClampedSwiglu(1.702, 0.5))


def test_many_tokens_and_blocks_of_256() -> None:
    check("plain", 30)
    check("Q4_K", 2, hidden=256, inner=256)


def test_bytes_are_those_of_the_stored_weights() -> None:
    stored, _ = both("zeros", HIDDEN, INNER)
    one = grouped("zeros", 2 * INNER, HIDDEN, 0).num_bytes + grouped("zeros", HIDDEN, INNER, 0).num_bytes
    assert stored.num_bytes == EXPERTS * one


def test_fixed_tiles_give_a_token_the_same_sums_in_any_batch() -> None:
    stored, _ = both("plain", HIDDEN, INNER, is_fixed=True)
    x, weights = torch.randn(20, HIDDEN).to(device, DTYPE), torch.rand(20, 2, device=device)
    ids = torch.tensor([[0, 1], [2, 1], [2, 0], [1, 2]], device=device).repeat(5, 1)
    assert torch.equal(stored(x, weights, ids)[:3], stored(x[:3], weights[:3], ids[:3]))


def test_experts_that_differ_are_refused() -> None:
    stack = Stack(2)
    stack.add(weight_of("plain", 8, 64, 0))
    with pytest.raises(ModelError, match="differently"):
        stack.add(weight_of("zeros", 8, 64, 1))
