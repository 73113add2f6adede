"""Products of quantised weights with activations rounded to INT8: close to the reference, for every format and size."""

from __future__ import annotations

import pytest
import torch
from helpers.stored_blocks import dequantised, random_blocks
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.ops.base.version import dtype_name
from millrace.ops.linear.stored import (
    FORMATS,
    StoredLinear,
    StoredPart,
    StoredWeight,
    pack_stored,
    packed_bytes,
    round_to_int8,
    stored_order,
)
from millrace.ops.registry import choose

CPU = torch.device("cpu")
ERROR = 1e-5
"""Of float32 sums, relative to the largest; rounding to INT8 alone is some 5e-3."""


def layer(
    kinds: list[str], sizes: list[int], columns: int, seed: int = 0, bias: torch.Tensor | None = None
) -> tuple[StoredLinear, torch.Tensor]:
    """The layer and its dequantised weight."""
    parts, weights = [], []
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        blocks = random_blocks(kind, size, columns, seed + i)
        parts.append(StoredPart(kind, size, pack_stored(kind, blocks, size, columns, "dot")))
        weights.append(dequantised(kind, blocks, columns, torch.float32))
    return StoredLinear(StoredWeight(tuple(parts), columns, torch.float32, "dot"), bias), torch.cat(weights)


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    expected = round_to_int8(x).double() @ weight.double().T
    if bias is not None:
        expected += bias
    scale = (round_to_int8(x).double().abs() @ weight.double().abs().T).clamp(min=1e-30)
    assert ((found - expected).abs() / scale).max() < ERROR


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_the_reference(kind: str) -> None:
    for outputs, columns in ((64, 256), (33, 512), (1, 256), (130, 1024)):
        bias = torch.randn(outputs) if outputs % 2 else None
        made, weight = layer([kind], [outputs], columns, bias=bias)
        whole = torch.randn(100, columns)
        everything = made(whole)
        check(everything, whole, weight, bias)
        # The same whatever the batch.
        for first, rows in ((7, 1), (8, 13), (1, 33), *((5, size) for size in range(1, 13))):
            assert torch.equal(made(whole[first : first + rows]), everything[first : first + rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_equal_the_dequantised_ones(kind: str) -> None:
    made, weight = layer([kind], [45], 512)
    ids = torch.tensor([44, 0, 7, 7, 31, 16])
    assert torch.equal(made.take_rows(ids), weight[ids])
    with pytest.raises(IndexError, match="token id 45 "):
        made.take_rows(torch.tensor([3, 45]))


@settings(max_examples=examples(15))
@given(
    kinds=st.lists(st.sampled_from(sorted(FORMATS)), min_size=1, max_size=3),
    outputs=st.integers(1, 70),
    rows=st.integers(1, 40),
    magnitude=st.sampled_from((1e-30, 1e-3, 1.0, 1e6)),
    seed=st.integers(0, 1000),
)
def test_any_parts_and_magnitudes(kinds: list[str], outputs: int, rows: int, magnitude: float, seed: int) -> None:
    made, weight = layer(kinds, [outputs + i for i in range(len(kinds))], 256, seed)
    x = torch.randn(rows, 300, generator=torch.Generator().manual_seed(seed))[:, :256] * magnitude
    x[0, 32:64] = 0
    check(made(x), x, weight)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0"])
def test_extreme_values_do_not_overflow(kind: str) -> None:
    made, weight = layer([kind], [64], 2048)
    for x in (torch.full((5, 2048), 3.0), -torch.ones(5, 2048), 4.0 * weight[:5].sign()):
        check(made(x), x, weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_outputs_of_its_row_only(value: float) -> None:
    made, _ = layer(["Q4_1"], [40], 256)
    x = torch.randn(13, 256)
    expected = made(x)
    x[5, 77] = value
    found = made(x)
    assert not found[5].isfinite().any()
    others = [row for row in range(13) if row != 5]
    assert torch.equal(found[others], expected[others])


def test_large_layers_use_several_threads() -> None:
    made, weight = layer(["Q4_K", "Q6_K"], [700, 333], 2048)
    x = torch.randn(500, 2048)
    check(made(x), x, weight)


def test_packed_size_is_that_of_the_other_order() -> None:
    blocks = random_blocks("Q5_K", 64, 512)
    assert pack_stored("Q5_K", blocks, 64, 512, "dot").nbytes == packed_bytes("Q5_K", 64, 512)


def test_it_is_chosen_only_on_request() -> None:
    assert stored_order(choose("stored_linear", CPU, torch.float32, deterministic=True, int8=True)) == "dot"
    assert stored_order(choose("stored_linear", CPU, torch.float32)) is None
    for dtype in (torch.bfloat16, torch.float16):
        assert choose("stored_linear", CPU, dtype, int8=True).version.name != "int8", dtype_name(dtype)
