"""The float16 KV cache of float32 models: every kernel writes and reads it as defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.paged import make_attention_case
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.attention import BatchedAttention, NativeAttention, ReferenceAttention
from millrace.ops.attention.qkv import NativePrepareQkv, TorchPrepareQkv
from millrace.ops.cpp import native
from millrace.ops.elementwise.rope import rope_angles
from millrace.ops.kv.cache import FLOAT16_MAX

needs_native = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")


@needs_native
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32), (128, 0)])
@pytest.mark.parametrize("norms", [False, True])
def test_native_write_equals_the_reference(head_dim: int, rotary: int, norms: bool) -> None:
    torch.manual_seed(1)
    weights = (torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5) if norms else (None, None)
    qkv = torch.randn(37, (6 + 4) * head_dim)
    angles = rope_angles(torch.arange(37), 1.0 / 10000 ** torch.linspace(0, 1, rotary // 2), 1.0) if rotary else None
    places = torch.randperm(5 * 16)[:37] + 16
    found, expected = (torch.zeros(2, 7, 2, 16, head_dim, dtype=torch.float16) for _ in range(2))
    for version, kv in ((NativePrepareQkv, found), (TorchPrepareQkv, expected)):
        version(6, 2, head_dim, 1e-6, *weights)(qkv.clone(), angles, kv, places // 16, places % 16)
    assert torch.equal(found[1], expected[1])
    # A key that differs in its last bit may round to the next number.
    torch.testing.assert_close(found[0], expected[0], rtol=2**-10, atol=2**-24)
    assert float((found[0] != expected[0]).float().mean()) < 0.01


@needs_native
def test_every_kind_of_number_is_rounded_like_torch_and_clamped() -> None:
    bits = torch.arange(-(2**31), 2**31, 65_521, dtype=torch.int64).to(torch.int32)
    numbers = bits.view(torch.float32)
    numbers = torch.cat((numbers, torch.tensor([65504.0, 65519.0, 65520.0, 1e9, -1e9, 2.0**-24, 2.0**-25, 0.0, -0.0])))
    values = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 1, 64)
    tokens = len(values)
    kv = torch.zeros(2, -(-tokens // 16), 1, 16, 64, dtype=torch.float16)
    qkv = torch.cat((torch.zeros(tokens, 2, 64), values), dim=1).flatten(1)
    places = torch.arange(tokens)
    NativePrepareQkv(1, 1, 64, 1e-6, None, None)(qkv, None, kv, places // 16, places % 16)
    found = kv[1].flatten(0, 2)[:tokens]
    expected = values[:, 0].clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@needs_native
@settings(max_examples=examples(20))
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 5, 8, 17]),
    head_dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 3, 16, 32, 100]),
    window=st.sampled_from([None, 1, 7, 64, 65]),
    softcap=st.sampled_from([None, 30.0]),
    seed=st.integers(0, 1000),
)
def test_attention_agrees_with_the_reference(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    sizes: dict[str, Any] = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim}
    lengths = [(queries, queries + before) for queries, before in rows]
    queries, kv, batch = make_attention_case(lengths, block_size=block_size, dtype=torch.float32, seed=seed, **sizes)
    arguments = (kv_heads * group, kv_heads, head_dim, head_dim**-0.5, softcap)
    half = kv.to(torch.float16)
    reference = ReferenceAttention(*arguments)
    expected = reference(queries, half, reference.prepare(batch, block_size, window))
    for version in (NativeAttention(*arguments), BatchedAttention(*arguments)):
        found = version(queries, half, version.prepare(batch, block_size, window))  # type: ignore[attr-defined,operator]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@needs_native
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_is_bit_equal_to_that_over_the_same_numbers_in_float32(head_dim: int) -> None:
    lengths = [(1, 130), (40, 100), (1, 64), (3, 3)]
    queries, kv, batch = make_attention_case(
        lengths, block_size=16, dtype=torch.float32, seed=3, heads=6, kv_heads=2, head_dim=head_dim
    )
    attention = NativeAttention(6, 2, head_dim, head_dim**-0.5)
    half = kv.to(torch.float16)
    prepared = attention.prepare(batch, 16, None)
    assert torch.equal(attention(queries, half, prepared), attention(queries, half.float(), prepared))
