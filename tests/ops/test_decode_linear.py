"""Decode rows over quantised weights: weights are not rounded, and the batch does not change a row's result."""

from __future__ import annotations

import pytest
import torch
from helpers.stored_blocks import dequantised, random_blocks
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.cpp.native import native, native_missing
from millrace.ops.linear.dense import NativeLinear
from millrace.ops.linear.stored import FORMATS, StoredLinear, StoredPart, StoredWeight, pack_stored

pytestmark = pytest.mark.skipif(bool(native_missing(torch.device("cpu"))), reason="no native kernels here")

MOST_ROWS = 8


def layer_of(
    kinds: list[str], sizes: list[int], columns: int, with_bias: bool = False, seed: int = 0
) -> tuple[StoredLinear, torch.Tensor, torch.Tensor]:
    """A layer, its exact weights, and its bias."""
    blocks = [random_blocks(kind, n, columns, seed + i) for i, (kind, n) in enumerate(zip(kinds, sizes, strict=True))]
    parts = tuple(
        StoredPart(kind, n, pack_stored(kind, own, n, columns))
        for kind, n, own in zip(kinds, sizes, blocks, strict=True)
    )
    weight = torch.cat(
        [dequantised(kind, own, columns, torch.float32) for kind, own in zip(kinds, blocks, strict=True)]
    )
    torch.manual_seed(seed)
    bias = torch.randn(sum(sizes)).bfloat16() if with_bias else torch.zeros(sum(sizes)).bfloat16()
    stored = StoredWeight(parts, columns, torch.bfloat16)
    return StoredLinear(stored, bias if with_bias else None), weight.double(), bias.double()


def is_exact(layer: StoredLinear) -> bool:
    """Without AMX decode rows use the same kernels as all others."""
    return layer.has_decode_kernel


def check_close(layer: StoredLinear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    expected = x.double() @ weight.T + bias
    # Before the float32 product, constants up to 16 times as large as the integers are added to them.
    size = x.double().abs() @ weight.abs().amax(1, keepdim=True).expand_as(weight).T + bias.abs()
    error = (layer.wide(x, decode=True).double() - expected).abs()
    assert (error <= size * (2e-6 if is_exact(layer) else 4e-3)).all(), float((error / size).max())
    rounded = layer.decode(x)
    assert rounded.dtype == torch.bfloat16
    if is_exact(layer):
        assert torch.equal(rounded, layer.wide(x, decode=True).bfloat16())


@pytest.mark.parametrize("kind", FORMATS)
def test_results_are_close_to_those_of_the_exact_weights(kind: str) -> None:
    for outputs, columns in ((64, 256), (33, 512), (16, 768), (1, 256), (130, 1024)):
        layer, weight, bias = layer_of([kind], [outputs], columns, with_bias=outputs % 2 == 1)
        for rows in range(1, MOST_ROWS + 1):
            check_close(layer, torch.randn(rows, columns).bfloat16(), weight, bias)


@settings(max_examples=examples(15))
@given(
    kinds=st.lists(st.sampled_from(sorted(FORMATS)), min_size=1, max_size=4),
    outputs=st.integers(1, 100),
    blocks=st.integers(1, 5),
    rows=st.integers(1, MOST_ROWS),
    seed=st.integers(0, 1000),
)
def test_any_size_and_mix_of_formats(kinds: list[str], outputs: int, blocks: int, rows: int, seed: int) -> None:
    sizes = [outputs + 7 * i for i in range(len(kinds))]
    layer, weight, bias = layer_of(kinds, sizes, 256 * blocks, with_bias=True, seed=seed)
    x = torch.randn(rows, 256 * blocks).bfloat16() * torch.logspace(-3, 3, rows).bfloat16()[:, None]
    check_close(layer, x, weight, bias)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_sizes_of_whole_tiles(kind: str) -> None:
    for columns in (32, 64, 96, 576):
        layer, weight, bias = layer_of([kind], [48], columns)
        for rows in (1, 3, 8):
            check_close(layer, torch.randn(rows, columns).bfloat16(), weight, bias)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_the_batch(kind: str) -> None:
    layer, _, _ = layer_of([kind], [80], 768)
    x = torch.randn(MOST_ROWS, 768).bfloat16()
    alone = torch.cat([layer.decode(row[None]) for row in x])
    for rows in range(2, MOST_ROWS + 1):
        for first in range(MOST_ROWS + 1 - rows):
            assert torch.equal(layer.decode(x[first : first + rows]), alone[first : first + rows])


def test_rows_of_any_stride() -> None:
    for kind in ("Q5_K", "Q6_K", "Q2_K"):
        layer, _, _ = layer_of([kind], [40], 256)
        for width in (257, 300):  # rows of bfloat16 with an odd stride are not aligned
            x = torch.randn(MOST_ROWS, width).bfloat16()[:, :256]
            for rows in (1, 5, MOST_ROWS):
                assert torch.equal(layer.decode(x[:rows]), layer.decode(x[:rows].contiguous()))


def test_rounding_error_is_smaller_than_for_prompts() -> None:
    layer, weight, _ = layer_of(["Q4_1"], [256], 1536)
    x = torch.randn(4, 1536).bfloat16()
    expected = x.double() @ weight.T

    def error(result: torch.Tensor) -> float:
        return float((result.double() - expected).norm())

    if is_exact(layer):
        assert error(layer.wide(x, decode=True)) < 0.01 * error(layer.wide(x))


def test_zero_rows() -> None:
    layer, _, _ = layer_of(["Q4_K"], [64], 256)
    assert layer.decode(torch.zeros(0, 256).bfloat16()).shape == (0, 64)


@pytest.mark.parametrize("kinds", [["Q4_K", "Q8_0"], ["Q6_K"], ["Q4_1"]], ids="+".join)
def test_many_rows_are_each_computed_as_alone(kinds: list[str]) -> None:
    layer, weight, bias = layer_of(kinds, [64, 40][: len(kinds)], 512, with_bias=True)
    x = torch.randn(150, 512).bfloat16()
    alone = torch.cat([layer.decode(row[None]) for row in x])
    scores = torch.cat([layer.wide(row[None], decode=True) for row in x])
    for rows in (9, 15, 16, 17, 33, 64, 65, 128, 150):
        assert torch.equal(layer.decode(x[:rows]), alone[:rows])
        assert torch.equal(layer.wide(x[:rows], decode=True), scores[:rows])
    check_close(layer, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_have_no_decode_kernel(dtype: torch.dtype) -> None:
    layer = NativeLinear(torch.randn(70, 96).to(dtype))
    assert not layer.has_decode_kernel
    for rows in (1, 4, 20):
        x = torch.randn(rows, 96).to(dtype)
        assert torch.equal(layer.decode(x), layer(x))
        assert torch.equal(layer.wide(x, decode=True), layer.wide(x))


def test_large_layers_use_several_threads() -> None:
    threads = torch.get_num_threads()
    layer, weight, bias = layer_of(["Q6_K"], [3000], 1024)
    x = torch.randn(5, 1024).bfloat16()
    alone = layer.decode(x)
    torch.set_num_threads(3)
    try:
        native()
        check_close(layer, x, weight, bias)
        assert torch.equal(layer.decode(x), alone)
    finally:
        torch.set_num_threads(threads)
        native()
