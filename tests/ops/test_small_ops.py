"""Norms, activations, RoPE, cache writes and soft caps: each version against its reference over odd sizes."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.attention import qkv
from millrace.ops.base.version import Version
from millrace.ops.elementwise import activation, norm
from millrace.ops.elementwise.rope import rope, rope_angles
from millrace.ops.elementwise.softcap import softcap
from millrace.ops.kv.cache import write_kv

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = st.sampled_from(list(TOLERANCE))


def runnable(versions: tuple[Version, ...], dtype: torch.dtype) -> list[Version]:
    return [version for version in versions if not version.reject_reason(CPU, dtype, False, {"head_dim": 64})]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(20))
@given(rows=st.integers(1, 40), dim=st.integers(1, 100), dtype=DTYPES, eps=st.sampled_from([1e-6, 1e-5, 0.1]))
def test_norms(rows: int, dim: int, dtype: torch.dtype, eps: float) -> None:
    torch.manual_seed(rows * 100 + dim)
    x, residual = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
    weight = torch.randn(dim)
    expected = norm.rms_norm(x, weight, eps)
    both, total = norm.add_rms_norm(x, residual, weight, eps)
    for version in runnable(norm.RMS_NORM_VERSIONS, dtype):
        close(version.make()(x, weight, eps), expected)
    for version in runnable(norm.ADD_RMS_NORM_VERSIONS, dtype):
        found, found_total = version.make()(x, residual, weight, eps)
        close(found, both)
        assert torch.equal(found_total, total)


def test_norm_follows_its_formula() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    expected = torch.tensor([[3.0, 8.0]]) / (12.5 + 0.5) ** 0.5
    torch.testing.assert_close(norm.rms_norm(x, weight, 0.5), expected)


def test_layer_norm_follows_its_formula() -> None:
    x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 5.0]])
    weight = torch.tensor([[1.0, 2.0], [0.5, 0.0]])
    normed, total = norm.ADD_LAYER_NORM_VERSIONS[0].make()(x, residual, weight, 0.75)
    assert torch.equal(total, x + residual)
    scale = (4.0 + 0.75) ** -0.5  # mean 5, variance 4
    torch.testing.assert_close(normed, torch.tensor([[-2.0 * scale + 0.5, 4.0 * scale]]))
    assert torch.equal(norm.LAYER_NORM_VERSIONS[0].make()(total, weight, 0.75), normed)


def test_activations_without_gates() -> None:
    x = torch.tensor([-2.0, 0.5, 3.0])
    expected = {"relu": [0.0, 0.5, 3.0], "relu2": [0.0, 0.25, 9.0]}
    assert {kind: activation.make_plain(kind)(x).tolist() for kind in expected} == expected
    for version in runnable(activation.PLAIN_VERSIONS, torch.float32):
        found = version.make("gelu_tanh")(x[None])[0]
        torch.testing.assert_close(found, torch.nn.functional.gelu(x, approximate="tanh"))


@settings(max_examples=examples(20))
@given(rows=st.integers(1, 70), inner=st.integers(1, 100), dtype=DTYPES, spread=st.sampled_from([1.0, 30.0, 200.0]))
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_gated(kind: activation.Activation, rows: int, inner: int, dtype: torch.dtype, spread: float) -> None:
    torch.manual_seed(rows * 100 + inner)
    gate_up = (torch.randn(rows, 2 * inner) * torch.tensor([spread] * inner + [1.0] * inner)).to(dtype)
    expected = activation.gated_reference(gate_up, kind)
    for version in runnable(activation.VERSIONS, dtype):
        close(version.make(kind)(gate_up), expected)


@settings(max_examples=examples(20))
@given(
    tokens=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 20, 64, 80, 256]),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    with_norms=st.booleans(),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=DTYPES,
)
def test_qkv(
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    rotated: float,
    with_norms: bool,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens)
    heads = kv_heads * group
    rotary_dim = int(head_dim * rotated) // 2 * 2
    frequencies = torch.rand(rotary_dim // 2)
    angles = rope_angles(torch.randint(0, 500, (tokens,)), frequencies, 1.3) if rotary_dim else None
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if with_norms else (None, None)
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.tensor(random.Random(tokens).sample(range(num_blocks * block_size), tokens))
    places = slots // block_size, slots % block_size
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    results = []
    for version in reversed(runnable(qkv.VERSIONS, dtype)):
        kv = torch.full((2, num_blocks, kv_heads, block_size, head_dim), 9.0, dtype=dtype)
        prepare = version.make(heads, kv_heads, head_dim, 1e-6, *norms)
        results.append((prepare(fused.clone(), angles, kv, *places), kv))
    for queries, kv in results[1:]:
        close(queries, results[0][0])
        close(kv, results[0][1])


def test_rope_rotates_pairs() -> None:
    angles = rope_angles(torch.tensor([0, 2]), torch.tensor([0.5, 0.25]), 1.0)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 7.0]]]).expand(2, 1, 5)
    turned = rope(x, angles)
    assert torch.equal(turned[0], x[0])
    cos, sin = torch.tensor([1.0, 0.5]).cos(), torch.tensor([1.0, 0.5]).sin()
    expected = torch.stack((cos[0] - 3 * sin[0], 2 * cos[1] - 4 * sin[1], 3 * cos[0] + sin[0], 4 * cos[1] + 2 * sin[1]))
    torch.testing.assert_close(turned[1, 0, :4], expected)
    assert turned[1, 0, 4] == 7.0


def test_write_kv_changes_only_its_slots() -> None:
    kv = torch.zeros(2, 4, 2, 3, 5)
    keys_values = torch.randn(2, 2, 2, 5)
    write_kv(keys_values, kv, torch.tensor([1, 3]), torch.tensor([1, 2]))
    assert torch.equal(kv[:, 1, :, 1], keys_values[0])
    assert torch.equal(kv[:, 3, :, 2], keys_values[1])
    kv[:, 1, :, 1] = kv[:, 3, :, 2] = 0
    assert not kv.any()


def test_softcap_bounds_and_keeps_small_values() -> None:
    found = softcap(torch.tensor([-1e9, -0.01, 0.0, 0.01, 1e9]), 30.0)
    torch.testing.assert_close(found, torch.tensor([-30.0, -0.01, 0.0, 0.01, 30.0]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_token_ops_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(200, 577).to(dtype), torch.randn(200, 577).to(dtype), torch.randn(577)
    gate_up = torch.randn(200, 602).to(dtype)
    for version in runnable(norm.ADD_RMS_NORM_VERSIONS, dtype):
        add, (whole, _) = version.make(), version.make()(x, residual, weight, 1e-5)
        for rows in (1, 3, 64, 65):
            assert torch.equal(add(x[:rows], residual[:rows], weight, 1e-5)[0], whole[:rows])
    add, wide = norm.add_layer_norm, torch.stack((weight, weight.flip(0)))
    for rows in (1, 3, 64, 65):
        assert torch.equal(add(x[:rows], residual[:rows], wide, 1e-5)[0], add(x, residual, wide, 1e-5)[0][:rows])
    for version in (*runnable(activation.VERSIONS, dtype), *runnable(activation.PLAIN_VERSIONS, dtype)):
        gated = version.make("silu")
        for rows in (1, 3, 64, 65):
            assert torch.equal(gated(gate_up[:rows]), gated(gate_up)[:rows]), version.name
