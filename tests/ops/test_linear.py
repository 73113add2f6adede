"""Linear layers: every version against float64; batch-invariant ones do not depend on the number of rows."""

from __future__ import annotations

import pytest
import torch
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.base.version import Version
from millrace.ops.head import embedding
from millrace.ops.linear import dense as linear
from millrace.ops.linear.dense import NativeLinear

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the magnitude of the summed terms."""


def runnable(versions: tuple[Version, ...], dtype: torch.dtype, k: int, n: int) -> list[Version]:
    shape = {"in_features": k, "out_features": n}
    return [version for version in versions if not version.reject_reason(CPU, dtype, False, shape)]


def tensors(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * 7 + k + n)
    return torch.randn(rows, k).to(dtype), (torch.randn(n, k) * 0.1).to(dtype), torch.randn(n).to(dtype)


def check(version: Version, rows: int, k: int, n: int, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = tensors(rows, k, n, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    found = version.make(weight, bias if with_bias else None)(x)
    assert found.dtype == dtype
    assert found.shape == (rows, n)
    scale = (x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1) + 1.0).clamp(min=1.0)
    error = ((found.double() - expected).abs() / scale).max()
    assert error < TOLERANCE[dtype], f"{version.name}: {error}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("k", "n"), [(64, 128), (576, 192), (1536, 64)])
def test_every_version_agrees_with_float64(k: int, n: int, dtype: torch.dtype) -> None:
    found = runnable(linear.VERSIONS, dtype, k, n)
    assert {version.name for version in found} >= {"reference", "tiles"}
    for version in found:
        for rows in (1, 2, 5, 16, 17, 31, 32, 33, 70):
            check(version, rows, k, n, dtype, with_bias=rows % 2 == 1)


@settings(max_examples=examples(20))
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 130),
    n=st.integers(1, 130),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_bias=st.booleans(),
)
def test_native_supports_any_size(rows: int, k: int, n: int, dtype: torch.dtype, with_bias: bool) -> None:
    version = next(version for version in linear.VERSIONS if version.name == "native")
    check(version, rows, k, n, dtype, with_bias)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("k", "n"), [(576, 960), (1536, 576), (576, 3072), (2048, 640)])
def test_batch_invariant_versions_do_not_depend_on_the_batch(k: int, n: int, dtype: torch.dtype) -> None:
    # Without instructions for bfloat16 its products take many times as long.
    x, weight, _ = tensors(300, k, n // 5 if dtype == torch.bfloat16 else n, dtype)
    checked = 0
    for version in runnable(linear.VERSIONS, dtype, k, len(weight)):
        if not version.is_batch_invariant(CPU):
            continue
        layer = version.make(weight, None)
        whole = layer(x)
        for first, rows in ((0, 1), (5, 1), (0, 2), (31, 3), (100, 16), (17, 33), (8, 64), (0, 129), (40, 257)):
            assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows]), (version.name, rows)
        checked += 1
    assert checked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_reads_rows_with_any_stride(dtype: torch.dtype) -> None:
    x, weight, _ = tensors(9, 96, 40, dtype)
    layer = NativeLinear(weight)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(layer(wide[:, :96]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("vocabulary", "hidden"), [(64, 64), (97, 48), (50, 31)])
def test_tied_embedding_looks_up_rows_and_computes_logits(vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight, _ = tensors(5, hidden, vocabulary, dtype)
    ids = torch.tensor([0, vocabulary - 1, 3, 3])
    for version in runnable(embedding.TIED_VERSIONS, dtype, hidden, vocabulary):
        tied = version.make(weight)
        assert torch.equal(tied.rows(ids), weight[ids])
        torch.testing.assert_close(tied.head(x), torch.nn.functional.linear(x, weight), atol=0.05, rtol=0.02)
        with pytest.raises(IndexError):
            tied.rows(torch.tensor([0, vocabulary]))
        with pytest.raises(IndexError):
            tied.rows(torch.tensor([-1]))


def test_num_bytes() -> None:
    weight, bias = torch.randn(64, 128), torch.randn(64)
    for version in runnable(linear.VERSIONS, torch.float32, 128, 64):
        assert version.make(weight, bias).num_bytes == weight.nbytes + bias.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 40, 140])
def test_rounded_float32_results_equal_those_of_a_call(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(rows, 576, 97, dtype)
    native = NativeLinear(weight, bias)
    wide = native.wide(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), native(x))
    expected = x.double() @ weight.double().T + bias.double()
    assert ((wide.double() - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_lm_head_has_float32_results(dtype: torch.dtype) -> None:
    x, weight, bias = tensors(3, 64, 128, dtype)
    for version in runnable(linear.VERSIONS, dtype, 64, 128):
        head = version.make(weight, bias)
        assert head.wide(x).dtype == torch.float32
        assert torch.equal(head.wide(x).to(dtype), head(x)), version.name
