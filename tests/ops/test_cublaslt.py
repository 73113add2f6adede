"""cuBLASLt products with measured algorithms: the table is valid, every entry gives the result of cuBLASLt's own choice
on a GPU, also in a CUDA graph, and products without an entry are left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.linear import cublaslt
from millrace.ops.linear.cublaslt import Algorithm, CublasltProduct, measured_product
from millrace.ops.linear.dense import MIN_ROWS_TO_ADD, TunedLinear
from millrace.ops.tuning.load import EntriesByRows, measured_on, read_product_table

TABLES = {name: read_product_table("h200", "cublaslt", name) for name in ("bf16", "float32")}
CASES = [(name, size) for name, table in TABLES.items() for size in table]
ROUNDED = 4e-3
"""Tolerance: relative error of float32 sums rounded to bfloat16."""


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(("name", "size"), CASES)
def test_entries_name_tiles_and_clusters_that_exist(name: str, size: tuple[int, int]) -> None:
    entries = TABLES[name][size]
    assert list(entries) == sorted(entries)
    assert size[1] * 2 % cublaslt.ALIGNED_BYTES == 0
    for choice in entries.values():
        if choice is not None:
            algorithm = Algorithm(*choice)
            assert algorithm.tile_number > 0
            assert algorithm.cluster_number in range(2, 11)
            assert 0 <= algorithm.option < 8


def test_every_tile_is_used_and_has_a_unique_number() -> None:
    used = {
        choice[:2] for table in TABLES.values() for entries in table.values() for choice in entries.values() if choice
    }
    assert used == set(cublaslt.TILES)
    assert len(set(cublaslt.TILES.values())) == len(cublaslt.TILES)


@pytest.mark.parametrize("wide", [False, True])
def test_without_a_gpu_or_an_entry_the_product_returns_none(wide: bool) -> None:
    weight = torch.randn(32, 16, dtype=torch.bfloat16)
    product = CublasltProduct(weight, {8: (128, 128, 2, 1, 1)}, wide=wide)
    assert product(torch.randn(8, 16, dtype=torch.bfloat16)) is None
    total = torch.ones(8, 32, dtype=torch.bfloat16)
    assert not product.add_to(torch.randn(8, 16, dtype=torch.bfloat16), total)
    assert (total == 1).all()
    assert measured_product(weight, wide=wide)(torch.randn(300, 16, dtype=torch.bfloat16)) is None


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cublaslt_handle() -> cublaslt.Cublaslt:
    device = torch.device("cuda")
    if measured_on(device) is None:
        pytest.skip("no algorithms were measured on this GPU")
    found = cublaslt.open_cublaslt(device)
    if found is None:
        pytest.skip("the algorithms were measured with another major version of cuBLAS")
    return found


def new(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02


def poisoned(product: CublasltProduct, x: Tensor, wide: bool) -> Tensor:
    shape = (x.shape[0], product.weight.shape[0])
    out = torch.full(shape, float("nan"), device="cuda", dtype=torch.float32 if wide else torch.bfloat16)
    assert product(x, out) is out
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_entry_is_used_and_correct(cublaslt_handle: cublaslt.Cublaslt, name: str, size: tuple[int, int]) -> None:
    wide = name == "float32"
    entries = TABLES[name][size]
    most_x, weight = new(max(entries), *size)
    product = measured_product(weight, wide=wide)
    for rows, choice in entries.items():
        x = most_x[:rows]
        if choice is None:
            assert product(x) is None
            continue
        wanted = torch.mm(x, weight.t(), out_dtype=torch.float32) if wide else F.linear(x, weight)
        assert error(poisoned(product, x, wide), wanted) < (1e-5 if wide else ROUNDED), (rows, choice)


@pytest.mark.gpu
@pytest.mark.parametrize("size", TABLES["bf16"])
def test_entries_of_many_rows_accumulate(cublaslt_handle: cublaslt.Cublaslt, size: tuple[int, int]) -> None:
    entries = TABLES["bf16"][size]
    most_x, weight = new(max(entries), *size)
    product, linear = measured_product(weight), TunedLinear(weight)
    for rows in (rows for rows in entries if rows >= MIN_ROWS_TO_ADD):
        assert linear.adds(rows)
        x, total = most_x[:rows], torch.randn(rows, size[0], device="cuda", dtype=torch.bfloat16)
        wanted = torch.mm(x, weight.t(), out_dtype=torch.float32) + total
        again = total.clone()
        assert product.add_to(x, total) == (entries[rows] is not None)
        linear.add_to(x, again)
        assert error(again, wanted) < ROUNDED, rows
        assert entries[rows] is None or torch.equal(total, again)


@pytest.mark.gpu
def test_a_captured_graph_adds_at_every_replay(cublaslt_handle: cublaslt.Cublaslt) -> None:
    x, weight = new(200, 512, 256)
    product, total = CublasltProduct(weight, SMALL), torch.zeros(200, 512, device="cuda", dtype=torch.bfloat16)
    assert product.add_to(x, total)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert product.add_to(x, total)
    for _ in range(3):
        x.normal_()
        wanted = total.float() + x.float() @ weight.float().t()
        graph.replay()
        assert error(total, wanted) < ROUNDED
    assert not product.add_to(x, total.t().contiguous().t()), "a result that is not row-major"


SMALL: EntriesByRows = {100: None, 200: (128, 128, 2, 1, 1), 300: (128, 128, 1, 1, 0)}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [101, 129, 200, 201, 299])
@pytest.mark.parametrize("wide", [False, True])
def test_odd_numbers_of_rows(cublaslt_handle: cublaslt.Cublaslt, rows: int, wide: bool) -> None:
    x, weight = new(rows, 520, 264)
    found = poisoned(CublasltProduct(weight, SMALL, wide=wide), x, wide)
    assert error(found, x.float() @ weight.float().t()) < ROUNDED


@pytest.mark.gpu
def test_products_without_an_algorithm_return_none(cublaslt_handle: cublaslt.Cublaslt) -> None:
    x, weight = new(301, 512, 256)
    product = CublasltProduct(weight, SMALL)
    assert product(x[:200]) is not None
    assert product(x[:100]) is None, "an entry without an algorithm"
    assert product(x) is None, "more rows than were measured"
    assert product(x[:200].float()) is None, "another dtype"
    assert product(torch.randn(150, 512, device="cuda", dtype=torch.bfloat16)[:, :256]) is None, "rows with gaps"
    shifted = torch.randn(150 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(150, 256)
    assert product(shifted) is None, "rows that are not aligned"
    odd_x, odd_weight = new(150, 511, 255)
    odd = CublasltProduct(odd_weight, SMALL)
    assert odd(odd_x) is None, "a size that the algorithm does not support"


@pytest.mark.gpu
def test_a_captured_graph_reads_its_input_at_replay(cublaslt_handle: cublaslt.Cublaslt) -> None:
    x, weight = new(200, 512, 256)
    product = CublasltProduct(weight, SMALL)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x)
    assert out is not None
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert error(out, F.linear(x, weight)) < ROUNDED


@pytest.mark.gpu
def test_linear_uses_cublaslt_and_falls_back(cublaslt_handle: cublaslt.Cublaslt) -> None:
    x, weight = new(448, 4096, 4096)
    bias = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    plain, biased = TunedLinear(weight), TunedLinear(weight, bias)
    for rows in (1, 100, 448):
        assert error(plain(x[:rows]), F.linear(x[:rows], weight)) < ROUNDED
        assert error(biased(x[:rows]), F.linear(x[:rows], weight, bias)) < ROUNDED
        assert plain.wide(x[:rows]).dtype == torch.float32
    gaps = torch.randn(448, 8192, device="cuda", dtype=torch.bfloat16)[:, :4096]
    assert error(plain(gaps), F.linear(gaps, weight)) < ROUNDED
