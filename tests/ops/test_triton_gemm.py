"""Matrix products in Triton against float64: every kind, odd sizes, split sums, fused activations, chosen by rows."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device, interpreted
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.activation_kind import Activation
from millrace.ops.base.quantised import with_quantise
from millrace.ops.elementwise.activation import activate, gated_reference
from millrace.ops.linear import dense as linear
from millrace.ops.linear.dense import InvariantLinear, PlainLinear, TunedLinear
from millrace.ops.linear.gated import ComposedGatedLinear, TunedGatedLinear
from millrace.ops.triton.gemm import choice as gemm_choice
from millrace.ops.triton.gemm.choice import TilesByRows
from millrace.ops.triton.gemm.product import Kind, Tiles, multiply, new_counters
from millrace.ops.tuning.load import Entry, ProductTable, read_product_table

# Triton's interpreter multiplies the bits of bfloat16 as integers.
DTYPES = [torch.float16] if interpreted else [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}
KINDS: tuple[Kind, ...] = ("dot", "swap", "dot_tma", "swap_tma")
BLOCK_N = {"dot": 32, "swap": 64, "dot_tma": 32, "swap_tma": 64}


def tensors(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * 7 + n + k)
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k) * 0.2, torch.randn(n)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    out = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if activation is None:
        return out
    gate, up = out.chunk(2, dim=-1)
    return activate(gate, activation) * up


def poison(rows: int, n: int, dtype: torch.dtype) -> None:
    """Leave NaN where the allocator will likely put the next result."""
    torch.full((rows, n), float("nan"), dtype=dtype, device=device)


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k", "split", "with_bias"),
    [(1, 96, 64, 1, True), (5, 72, 208, 2, False), (17, 130, 136, 3, True), (40, 64, 96, 5, False)],
)
def test_products(kind: Kind, rows: int, n: int, k: int, split: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(rows, n, k, dtype)
    tiles = Tiles(kind, 16, BLOCK_N[kind], 32, split=split, stages=2)
    counters = new_counters(tiles.count(rows, n), device)
    poison(rows, n, dtype)
    found = multiply(x, weight, tiles, bias=bias if with_bias else None, counters=counters)
    check(found, expected(x, weight, bias if with_bias else None), dtype)
    assert not counters.any(), "counters are zero for the next launch"
    again = multiply(x, weight, tiles, bias=bias if with_bias else None, counters=counters)
    assert torch.equal(again, found), "the order of a split sum is fixed"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(
    ("kind", "rows", "split"), [("dot", 3, 1), ("swap", 18, 3), ("dot_tma", 9, 2), ("swap_tma", 5, 1), ("gemv", 2, 1)]
)
def test_gate_and_up_in_one_product(kind: Kind, rows: int, split: int, activation: Activation) -> None:
    dtype, inner, k = DTYPES[0], 80, 96
    x, weight, bias = tensors(rows, 2 * inner, k, dtype)
    tiles = Tiles(kind, 2 if kind == "gemv" else 16, BLOCK_N.get(kind, 16), 32, split=split, stages=2)
    counters = new_counters(tiles.count(rows, inner), device)
    for own_bias in (None, bias):
        poison(rows, inner, dtype)
        found = multiply(x, weight, tiles, bias=own_bias, activation=activation, counters=counters)
        check(found, expected(x, weight, own_bias, activation), dtype)
    assert not counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "n", "k", "block"), [(1, 21, 96, 32), (2, 16, 200, 64), (1, 5, 7, 16)])
def test_few_rows_without_tensor_cores(rows: int, n: int, k: int, block: int, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(rows, n, k, dtype)
    poison(rows, n, dtype)
    found = multiply(x, weight, Tiles("gemv", 2, 4, block, stages=1), bias=bias)
    check(found, expected(x, weight, bias), dtype)
    with pytest.raises(ValueError, match="one or two rows"):
        multiply(torch.cat((x, x, x)), weight, Tiles("gemv", 2, 4, block, stages=1))


def test_any_stride_no_rows_and_missing_counters() -> None:
    x, weight, _ = tensors(6, 40, 64, DTYPES[0])
    tiles = Tiles("dot", 16, 32, 32, stages=2)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(multiply(wide[:, :64], weight, tiles), multiply(x, weight, tiles))
    assert torch.equal(multiply(x.T.contiguous().T, weight, tiles), multiply(x, weight, tiles))
    assert multiply(x[:0], weight, tiles).shape == (0, 40)
    with pytest.raises(ValueError, match="counters"):
        multiply(x, weight, Tiles("dot", 16, 32, 32, split=2))


# --- the choice by rows ---


def test_rows_use_the_next_larger_entry_and_beyond_the_last_cublaslt() -> None:
    small, large = Tiles("gemv", 2, 4, 512), Tiles("dot", 64, 64, 64, split=4)
    by_rows = TilesByRows((2, 16, 64), (small, None, large))
    assert [by_rows.of(rows) for rows in (1, 2, 3, 16, 17, 64, 65, 9999)] == (
        [small, small, None, None, large, large, None, None]
    )
    counters = by_rows.counters(1000, device)
    assert counters is not None
    assert counters.shape[0] == large.count(64, 1000) == 16
    assert gemm_choice.NO_TILES.counters(1000, device) is None


def test_unmeasured_sizes_use_the_entries_of_the_nearest_size() -> None:
    entry: Entry = ("dot", 16, 32, 64, 1, 4, 4, False)
    table: ProductTable = {(1024, 2048): {1: entry}, (4096, 4096): {1: None}}
    assert gemm_choice.nearest(table, 1024, 2048) == {1: entry}
    assert gemm_choice.nearest(table, 1152, 1536) == {1: entry}
    assert gemm_choice.nearest(table, 5120, 5120) == {1: None}
    assert gemm_choice.nearest(table, 1024, 8192) == {}
    assert gemm_choice.nearest(table, 1024, 2049) == {}
    assert gemm_choice.nearest({}, 1024, 2048) == {}


@pytest.mark.parametrize(
    ("name", "x_bytes", "weight_bytes", "halves"),
    [
        ("bf16", 2, 2, 1),
        ("gated", 2, 2, 2),
        ("fp8", 1, 1, 1),
        ("fp8_wide", 2, 1, 1),
        ("fp8_gated", 1, 1, 2),
    ],
)
def test_every_entry_of_the_tables_can_be_launched(name: str, x_bytes: int, weight_bytes: int, halves: int) -> None:
    table = read_product_table("h200", "gemm", name)
    for (_, inputs), entries in table.items():
        for rows, entry in entries.items():
            tiles = gemm_choice.tiles_of(entry)
            if tiles is None:
                continue
            assert tiles.takes(rows), (inputs, rows, entry)
            stage = (tiles.n * halves * weight_bytes + tiles.m * x_bytes) * tiles.k
            if tiles.kind != "gemv":
                assert stage * (tiles.stages - 1) <= 227 * 1024, (inputs, rows, entry)
            for size in (tiles.m, tiles.n, tiles.k, tiles.warps):
                assert size & (size - 1) == 0
            assert tiles.split <= -(-inputs // tiles.k)


def test_tuned_linear_follows_its_table() -> None:
    dtype = DTYPES[0]
    x, weight, bias = tensors(40, 64, 96, dtype)
    tiles = TilesByRows((2, 20), (Tiles("gemv", 2, 4, 32, stages=1), Tiles("dot", 16, 32, 32, split=2, stages=2)))
    layer = TunedLinear(weight, bias, tiles)
    assert not layer.takes_fp8
    assert layer.num_bytes == weight.nbytes + bias.nbytes
    for rows in (1, 2, 3, 20, 40):
        check(layer(x[:rows]), expected(x[:rows], weight, bias), dtype)
    assert torch.equal(layer(x), F.linear(x, weight, bias)), "beyond the table cuBLASLt is used"


def test_tuned_linear_adds_to_the_residual_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS_TO_ADD", 10)
    dtype = DTYPES[-1]
    x, weight, bias = tensors(40, 64, 96, dtype)
    tiles = TilesByRows((12, 20), (None, Tiles("dot", 16, 32, 32, stages=2)))
    layer = TunedLinear(weight, tiles=tiles)
    assert [layer.adds(rows) for rows in (9, 10, 12, 13, 20, 21)] == [False, True, True, False, False, True]
    assert not TunedLinear(weight, bias, tiles).adds(40), "a bias would need a second addition"
    for rows in (12, 21, 40):
        total = torch.randn(rows, 64, device=device).to(dtype)
        wanted = expected(x[:rows], weight, None) + total.double()
        layer.add_to(x[:rows], total)
        check(total, wanted, dtype)


@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_float32_results_are_not_rounded(rows: int) -> None:
    x, weight, bias = tensors(rows, 64, 96, DTYPES[-1])
    wanted = expected(x, weight, bias)
    tiles = TilesByRows((2, 20), (Tiles("gemv", 2, 4, 32, stages=1), Tiles("dot", 16, 32, 32, split=2, stages=2)))
    for head in (TunedLinear(weight, bias, tiles), InvariantLinear(weight, bias)):
        out = torch.full((rows, 64), float("nan"), device=device)
        for wide in (head.wide(x), head.wide(x, out)):
            if not interpreted or rows <= 20:  # torch rounds its own product on a CPU
                check(wide, wanted, torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_tuned_gated_linear_equals_the_composed_one(activation: Activation) -> None:
    dtype = DTYPES[0]
    x, weight, bias = tensors(40, 128, 96, dtype)
    gated = with_quantise(lambda gate_up: gated_reference(gate_up, activation))
    tiles = TilesByRows((20,), (Tiles("dot", 16, 32, 32, split=2, stages=2),))
    composed = ComposedGatedLinear(weight, bias, activation, PlainLinear, gated)
    tuned = TunedGatedLinear(weight, bias, activation, PlainLinear, gated, tiles)
    assert tuned.num_bytes == composed.num_bytes == weight.nbytes + bias.nbytes
    for rows in (1, 20, 21):
        wanted = expected(x[:rows], weight, bias, activation)
        check(composed(x[:rows]), wanted, dtype)
        check(tuned(x[:rows]), wanted, dtype)
    quantised = tuned(x[:20], quantise=True)
    wanted = expected(x[:20], weight, bias, activation)
    assert ((quantised.widen().double() - wanted).norm() / wanted.norm()).item() < 0.05


# --- deterministic ---


@pytest.mark.parametrize(("n", "k", "dtype"), [(72, 1100, DTYPES[0]), (130, 96, DTYPES[-1]), (40, 96, torch.float32)])
def test_invariant_linear_does_not_depend_on_the_batch(n: int, k: int, dtype: torch.dtype) -> None:
    total = 150 if interpreted else 700
    x, weight, bias = tensors(total, n, k, dtype)
    layer = InvariantLinear(weight, bias)
    whole = layer(x)
    check(whole, expected(x, weight, bias), dtype)
    for first, rows in ((0, 1), (5, 1), (31, 3), (17, 33), (8, 70), (3, 129)):
        assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows]), rows


def test_split_sums_are_equal_in_parallel_and_in_sequence() -> None:
    x, weight, _ = tensors(20, 64, 200, torch.float32)
    counters = new_counters(16, device)
    results = [
        multiply(x, weight, Tiles("dot", 16, 32, 32, split=3, stages=2, parallel=parallel), counters=counters)
        for parallel in (True, False)
    ]
    assert torch.equal(*results)


@pytest.mark.skipif(interpreted, reason="only a GPU has programmatic dependent launch")
@pytest.mark.parametrize(
    "tiles",
    [
        Tiles("gemv", 2, 4, 512, 1, 4, 1, pdl=True),
        Tiles("dot", 16, 32, 256, 2, 4, 4, pdl=True),
        Tiles("swap_tma", 16, 64, 256, 4, 4, 4, pdl=True),
    ],
)
def test_kernels_with_pdl_wait_for_their_inputs(tiles: Tiles) -> None:
    """In a graph, as in the engine: the previous kernel writes the input, the next one reads the output."""
    source, weight, _ = tensors(tiles.m, 2048, 2048, torch.bfloat16)
    weight *= 0.1
    counters = new_counters(1024, device)

    def run() -> Tensor:
        x = source
        for _ in range(5):
            x = x + 1
        return multiply(multiply(x, weight, tiles, counters=counters) * 0.5, weight, tiles, counters=counters) + 1

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        source.normal_()
        graph.replay()
        middle = ((source + 5).double() @ weight.double().T).bfloat16() * 0.5
        wanted = middle.double() @ weight.double().T + 1
        assert ((out.double() - wanted).norm() / wanted.norm()).item() < 3e-2
    assert not counters.any()
