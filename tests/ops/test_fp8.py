"""Eight-bit products: rows and weights quantised as the reference says, every version near the unquantised product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.triton_mode import device, interpreted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.ops.activation import gated_reference
from millrace.ops.fp8_linear import Fp8Invariant, Fp8Reference, Fp8Tuned
from millrace.ops.gated_linear import TunedFp8GatedLinear
from millrace.ops.quantised import FP8, FP8_MAX, Quantised, quantise_rows, quantise_weight, with_quantise
from millrace.ops.triton import fp8
from millrace.ops.triton.gemm import Kind, Scales, Tiles, multiply, multiply_to_groups, new_counters
from millrace.ops.triton.gemm_choice import Fp8Tiles, TilesByRows


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> Tensor:
    torch.manual_seed(rows * 1000 + columns)
    scale = torch.exp(torch.randn(rows, 1) * spread)
    return (torch.randn(rows, columns) * scale).to(device, dtype)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


# --- the reference ---


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 70), spread=st.sampled_from([0.0, 1.0, 8.0]))
def test_rows_keep_their_size_and_their_zeros(rows: int, columns: int, spread: float) -> None:
    x = random(rows, columns, torch.float32, spread)
    x[0] = 0
    found = quantise_rows(x)
    assert found.values.dtype == FP8
    assert found.scales.dtype == torch.float32
    assert found.shape == x.shape
    assert (found.widen() - x).abs().max(dim=1).values.le(x.abs().amax(dim=1) / 16 + 1e-30).all()
    largest = found.values.float().abs().amax(dim=1)
    assert (largest[x.abs().amax(dim=1) > 0] == FP8_MAX).all()
    assert (found.values[0].float() == 0).all()
    assert found.scales[0] == 1


def test_weights_are_quantised_in_slices_like_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(37, 50)
    whole = quantise_weight(weight)
    monkeypatch.setattr("millrace.ops.quantised._SLICE_ITEMS", 150)
    sliced = quantise_weight(weight)
    assert torch.equal(whole.values.float(), sliced.values.float())
    assert torch.equal(whole.scales, sliced.scales)


def test_functions_get_the_keyword_they_lack() -> None:
    x = random(3, 8)
    plain = with_quantise(lambda value: value * 2)
    assert torch.equal(plain(x), x * 2)
    assert torch.equal(plain(x, quantise=True).scales, quantise_rows(x * 2).scales)
    pair = with_quantise(lambda value: (value, value + 1))
    normed, total = pair(x, quantise=True)
    assert isinstance(normed, Quantised)
    assert torch.equal(total, x + 1)

    def fused(value: Tensor, quantise: bool = False) -> Tensor:
        return value

    assert with_quantise(fused) is fused


# --- the kernels ---


@pytest.mark.parametrize(
    ("rows", "columns", "whole_row"), [(1, 96, 16384), (7, 200, 16384), (4, 300, 64), (3, 128, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantised_as_the_reference_does(rows: int, columns: int, whole_row: int, dtype: torch.dtype) -> None:
    x = random(rows, columns, dtype)
    x[-1] = 0
    found, wanted = fp8.quantise_rows(x, whole_row), quantise_rows(x)
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-6, atol=0)
    values, right = found.values.float(), wanted.values.float()
    if interpreted:  # Triton's interpreter loses the carry of a mantissa that rounds up to the next power of two.
        values = torch.where(values == right / 2, right, values)
    # One more or less in the last place where a quotient lies between two numbers.
    assert (values - right).abs().le(right.abs() / 8).all()
    assert (values != right).float().mean() < 0.02
    assert (found.values[-1].float() == 0).all()
    view = torch.cat((x, x), dim=1)[:, :columns]
    assert torch.equal(fp8.quantise_rows(view, whole_row).values.float(), found.values.float())
    assert fp8.quantise_rows(x[:0]).shape == (0, columns)


@pytest.mark.parametrize("kind", ["dot", "swap", "swap_tma", "gemv"])
@pytest.mark.parametrize(("rows", "n", "k", "split", "with_bias"), [(2, 96, 128, 1, True), (21, 70, 208, 2, False)])
def test_products(kind: Kind, rows: int, n: int, k: int, split: int, with_bias: bool) -> None:
    if kind == "gemv":
        rows, split = min(rows, 2), 1
    x, weight = quantise_rows(random(rows, k)), quantise_weight(random(n, k))
    bias = random(1, n)[0] if with_bias else None
    tiles = Tiles(kind, 2 if kind == "gemv" else 16, 4 if kind == "gemv" else 64, 64, split=split, stages=2)
    found = multiply(
        x.values,
        weight.values,
        tiles,
        bias=bias,
        scales=Scales(x.scales, weight.scales),
        out_dtype=torch.bfloat16,
        counters=new_counters(tiles.count(rows, n), device),
    )
    wanted = x.widen().double() @ weight.widen().double().T + (0 if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    assert relative_error(found, wanted) < 8e-3


# --- layers ---

MANY = TilesByRows((2, 4096), (Tiles("gemv", 2, 4, 64, stages=1), Tiles("swap", 16, 64, 128, split=2, stages=2)))


def make_tuned(weight: Tensor, bias: Tensor | None = None) -> Fp8Tuned:
    return Fp8Tuned(weight, bias, Fp8Tiles(MANY))


@pytest.mark.parametrize("make", [Fp8Reference, Fp8Invariant, make_tuned])
def test_layers_are_near_the_product_they_stand_for(make: type[Fp8Reference]) -> None:
    weight, bias = random(80, 144, spread=0.0), random(1, 80)[0]
    layer = make(weight, bias)
    assert layer.takes_fp8
    assert layer.num_bytes == 80 * 144 + 80 * 4 + bias.nbytes
    for rows in (1, 2, 3, 33):
        x = random(rows, 144)
        found = layer(quantise_rows(x))
        assert found.dtype == torch.bfloat16
        assert found.shape == (rows, 80)
        exact = x.double() @ weight.double().T
        assert relative_error(found, exact + bias.double()) < 0.06
        assert relative_error(found, Fp8Reference(weight, bias)(x)) < 8e-3
        # From plain rows; the interpreter's rounding is the one described above.
        assert relative_error(layer(x), exact + bias.double()) < (0.3 if interpreted else 0.06)


def test_invariant_layer_does_not_depend_on_the_batch() -> None:
    layer, x = Fp8Invariant(random(72, 1040)), random(150, 1040)
    whole = layer(x)
    for first, rows in ((0, 1), (31, 3), (17, 33), (3, 129)):
        assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows]), rows


@pytest.mark.skipif(interpreted, reason="the library's scaled product needs a GPU")
def test_library_product_on_the_gpu() -> None:
    weight, bias = random(256, 512), random(1, 256)[0]
    layer, own = Fp8Tuned(weight, bias), Fp8Reference(weight, bias)
    for rows in (1, 3, 16, 130):
        x = random(rows, 512)
        assert relative_error(layer(x), own(x)) < 1e-2


# --- inputs that are rounded on their way, and in groups ---


def exact_rows(rows: int, columns: int, group: int) -> Tensor:
    """Values that eight bits hold exactly, with the scale 1/16 in every group."""
    torch.manual_seed(rows + columns)
    x = (torch.randn(rows, columns // group, group) * 4).to(FP8).float()
    x[:, :, 0] = FP8_MAX / 16
    return x.view(rows, columns).to(device, torch.bfloat16)


def grouped(x: Tensor, group: int) -> Quantised:
    rows, columns = x.shape
    found = quantise_rows(x.reshape(-1, group))
    return Quantised(found.values.view(rows, columns), found.scales.view(rows, columns // group))


def wide_product(x: Tensor, weight: Quantised, bias: Tensor | None, scales: Tensor | None, tiles: Tiles) -> Tensor:
    return multiply(
        x,
        weight.values,
        tiles,
        bias=bias,
        scales=Scales(scales, weight.scales),
        out_dtype=torch.bfloat16,
        counters=new_counters(64, device),
    )


@pytest.mark.parametrize("kind", ["dot", "swap", "swap_tma", "dot_tma", "gemv"])
@pytest.mark.parametrize(("rows", "n", "k", "split", "with_bias"), [(2, 96, 128, 1, True), (19, 70, 192, 2, False)])
def test_inputs_are_rounded_on_their_way(kind: Kind, rows: int, n: int, k: int, split: int, with_bias: bool) -> None:
    gemv = kind == "gemv"
    rows, split = (min(rows, 2), 1) if gemv else (rows, split)
    x, weight, bias = exact_rows(rows, k, 64), quantise_weight(random(n, k)), random(1, n)[0]
    bias = bias if with_bias else None
    tiles = Tiles(kind, 2 if gemv else 16, 4 if gemv else 64, 64, split=split, stages=2, shared_x=with_bias)
    found = wide_product(x, weight, bias, None, tiles)
    wanted = x.double() @ weight.widen().double().T + (0 if bias is None else bias.double())
    assert relative_error(found, wanted) < 8e-3


@pytest.mark.parametrize("kind", ["dot", "swap", "swap_tma"])
@pytest.mark.parametrize(("rows", "n", "group", "split"), [(3, 96, 64, 1), (21, 70, 128, 3)])
def test_inputs_in_groups(kind: Kind, rows: int, n: int, group: int, split: int) -> None:
    k = 5 * 128
    x, weight = (
        grouped(random(rows, k) * torch.linspace(0.1, 9, k, device=device), group),
        quantise_weight(random(n, k)),
    )
    assert x.scales.shape == (rows, k // group)
    found = wide_product(x.values, weight, None, x.scales, Tiles(kind, 16, 64, 64, split=split, stages=2))
    assert relative_error(found, x.widen().double() @ weight.widen().double().T) < 8e-3


def test_groups_that_tiles_do_not_divide_are_refused() -> None:
    x, weight = grouped(random(2, 128), 32), quantise_weight(random(16, 128))
    with pytest.raises(ValueError, match="do not divide"):
        wide_product(x.values, weight, None, x.scales, Tiles("dot", 16, 32, 64))
    with pytest.raises(ValueError, match="one scale for each row"):
        wide_product(x.values, weight, None, x.scales, Tiles("gemv", 2, 4, 32))
    with pytest.raises(ValueError, match="cannot be scaled in groups"):
        multiply_to_groups(x.values, quantise_weight(random(80, 128)).values, Tiles("dot", 16, 32, 64))


@pytest.mark.parametrize(("kind", "split"), [("dot", 1), ("swap", 2), ("swap_tma", 1)])
def test_gates_and_ups_to_groups(kind: Kind, split: int) -> None:
    rows, inner, k = 18, 128, 192
    x, weight = quantise_rows(random(rows, k)), quantise_weight(random(2 * inner, k, spread=0.0))
    tiles = Tiles(kind, 16, 64, 64, split=split, stages=2)
    counters = new_counters(64, device)
    scales = Scales(x.scales, weight.scales)
    found = multiply_to_groups(x.values, weight.values, tiles, scales=scales, activation="silu", counters=counters)
    plain = multiply(
        x.values, weight.values, tiles, scales=scales, activation="silu", counters=counters, out_dtype=torch.float32
    )
    wanted = grouped(plain, 64)
    assert found.scales.shape == (rows, 2)
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
    values, right = found.values.float(), wanted.values.float()
    if interpreted:  # as above
        values = torch.where(values == right / 2, right, values)
    # Below the smallest normal number steps are even.
    assert (values - right).abs().le(right.abs() / 8 + 2**-6).all()
    gate, up = (x.widen().double() @ weight.widen().double().T).chunk(2, dim=-1)
    assert relative_error(plain, torch.nn.functional.silu(gate) * up) < 8e-3


def test_an_mlp_is_near_the_unquantised_whatever_passes_between_its_halves() -> None:
    """Results in groups, in the model's dtype, and by the parts; gate_up [2 I, H], down [H, I]."""
    inner, hidden = 128, 64
    gate_up, down = random(2 * inner, hidden, spread=0.0) * 0.2, random(hidden, inner, spread=0.0) * 0.1
    small, in_groups = Tiles("swap", 16, 64, 64, stages=2), Tiles("swap", 16, 64, 64, split=2, stages=2)
    down_linear = Fp8Tuned(
        down, None, Fp8Tiles(TilesByRows((99,), (small,)), TilesByRows((4,), (small,)), TilesByRows((8,), (in_groups,)))
    )
    parts = with_quantise(lambda value: gated_reference(value, "silu"))
    tables = (TilesByRows((4,), (small,)), TilesByRows((4, 16), (None, in_groups)))
    first = TunedFp8GatedLinear(gate_up, None, "silu", make_linear(small), parts, tables)
    assert first.takes_fp8
    assert first.num_bytes == gate_up.numel() + 4 * gate_up.shape[0]
    for rows, kind in ((3, Tensor), (8, Quantised), (12, Quantised), (20, Quantised)):
        x = random(rows, hidden, spread=0.0)
        between = first(quantise_rows(x), quantise=True)
        assert isinstance(between, kind)
        gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
        wanted = (torch.nn.functional.silu(gate) * up) @ down.double().T
        # The interpreter's rounding to eight bits is the one described above.
        assert relative_error(down_linear(between), wanted) < (0.3 if interpreted else 0.08)
    assert isinstance(first(random(2, hidden), quantise=True), Quantised)
    assert isinstance(first(quantise_rows(random(2, hidden))), Tensor)


def make_linear(tiles: Tiles) -> Callable[[Tensor, Tensor | None], Fp8Tuned]:
    return lambda weight, bias: Fp8Tuned(weight, bias, Fp8Tiles(TilesByRows((99,), (tiles,))))
