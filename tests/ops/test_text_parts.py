"""What stands between the products of encoders: each version against its reference; a text against its neighbours."""

from __future__ import annotations

import pytest
import torch
from helpers.suite import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.ops.attention.texts import NativeTextAttention, TextSpans, attend_texts
from millrace.ops.base.activation_kind import Activation as ActivationKind
from millrace.ops.elementwise import biased
from millrace.ops.registry import choose

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=4)


def spans(lengths: list[int], seen: list[int] | None = None) -> TextSpans:
    return TextSpans(torch.tensor([0, *lengths]).cumsum(0), torch.tensor(seen or lengths))


@settings(max_examples=examples(30))
@given(
    lengths=LENGTHS,
    heads=st.integers(1, 3),
    head=st.sampled_from([16, 32, 48, 64]),
    window=st.sampled_from([0, 1, 7, 40]),
    part=st.sampled_from([1.0, 0.5]),
)
@example(lengths=[1], heads=1, head=32, window=0, part=1.0)
@example(lengths=[900], heads=1, head=16, window=33, part=1.0)
def test_attention_within_texts(lengths: list[int], heads: int, head: int, window: int, part: float) -> None:
    torch.manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths), 3, heads, head) * 2
    # With a window every token sees itself at least.
    seen = [max(1, int(length * part)) for length in lengths] if not window else lengths
    where = spans(lengths, seen)
    found, expected = NativeTextAttention()(qkv, where, window), attend_texts(qkv, where, window)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_large_scores_and_equal_ones() -> None:
    qkv = torch.zeros(40, 3, 1, 16)
    qkv[:, 2, 0, 0] = torch.arange(40.0)
    assert torch.allclose(NativeTextAttention()(qkv, spans([40]), 0)[:, 0, 0], torch.tensor(19.5))
    qkv[:, 0], qkv[7, 1] = 100.0, 100.0
    assert torch.equal(NativeTextAttention()(qkv, spans([40]), 0)[:, 0, 0], torch.full((40,), 7.0))


@pytest.mark.parametrize("window", [0, 20])
def test_a_text_does_not_depend_on_its_neighbours(window: int) -> None:
    torch.manual_seed(0)
    lengths = [1, 5, 12, 13, 33, 64, 401]
    qkv, attend = torch.randn(sum(lengths), 3, 2, 32), NativeTextAttention()
    together = attend(qkv, spans(lengths), window).split(lengths)
    for own, out in zip(qkv.split(lengths), together, strict=True):
        assert torch.equal(attend(own, spans([len(own)]), window), out)


@settings(max_examples=examples(20))
@given(rows=st.integers(1, 70), width=st.integers(1, 100), has_bias=st.booleans(), spread=st.sampled_from([1.0, 30.0]))
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_activation_with_a_bias(kind: ActivationKind, rows: int, width: int, has_bias: bool, spread: float) -> None:
    torch.manual_seed(rows * 100 + width)
    x, bias = torch.randn(rows, width) * spread, torch.randn(width) if has_bias else None
    expected = biased.make_bias_activation(kind)(x.clone(), bias)
    found = biased.make_native_activation(kind)(x, bias)
    torch.testing.assert_close(found, expected, atol=2e-6 * max(1.0, spread), rtol=2e-6)


@settings(max_examples=examples(20))
@given(rows=st.integers(1, 70), width=st.integers(2, 100), has_bias=st.booleans(), has_offset=st.booleans())
def test_layer_norm_with_a_bias(rows: int, width: int, has_bias: bool, has_offset: bool) -> None:
    torch.manual_seed(rows * 100 + width)
    x, weight = torch.randn(rows, width) + 3, torch.randn(width)
    bias, offset = (torch.randn(width) if has else None for has in (has_bias, has_offset))
    expected = biased.bias_layer_norm(x.clone(), bias, weight, offset, 1e-5)
    found = biased.NativeBiasLayerNorm()(x, bias, weight, offset, 1e-5)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", ["text_attention", "bias_activation", "bias_layer_norm"])
def test_without_avx512_torch_computes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.ops.cpp.native.processor_features", lambda: frozenset({"avx2", "fma"}))
    chosen = choose(op, torch.device("cpu"), torch.float32, head_dim=32)
    assert chosen.version.name == "reference"
    assert "needs AVX-512" in chosen.reason
