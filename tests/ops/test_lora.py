"""add_lora: every version against the formula, and a token's result against its neighbours."""

from __future__ import annotations

import pytest
import torch
from helpers.triton_mode import device, interpreted

from millrace.ops.cpp.native import native
from millrace.ops.lora.add import NativeAddLora, add_lora, make_triton
from millrace.ops.lora.weights import LinearLora, LoraColumns, LoraPart, LoraTable, pack
from millrace.ops.triton.lora import MOST_ROWS

SIZES, INPUTS = (40, 16, 19), 37


def random_lora(
    ranks: tuple[int, ...], dtype: torch.dtype, inputs: int = INPUTS, sizes: tuple[int, ...] = SIZES
) -> LinearLora:
    return pack(
        [
            LoraPart(torch.randn(rank, inputs).to(dtype), torch.randn(rank, size).to(dtype), 0.1 + rank / 64)
            if rank
            else None
            for rank, size in zip(ranks, sizes, strict=True)
        ]
    )


def mixed_table(dtype: torch.dtype, device: str = "cpu") -> LoraTable:
    torch.manual_seed(0)
    columns = LoraColumns(2, 6, torch.device(device))
    for slot, ranks in enumerate(((4, 4, 4), (0, 50, 7), (33, 0, 0), (1, 2, 0)), start=1):
        columns.put(slot, {1: random_lora(ranks, dtype).to(torch.device(device))})
    return LoraTable(columns, 1, SIZES, INPUTS)


def expected(x: torch.Tensor, slots: torch.Tensor, table: LoraTable, out: torch.Tensor) -> torch.Tensor:
    total = out.double()
    for token, slot in enumerate(slots.tolist()):
        for first, end, a, b, scale in table.parts(slot):
            total[token, first:end] += scale * (x[token].double() @ a.double().t()) @ b.double()
    return total


SLOTS = torch.tensor([1, 1, 1, 1, 1, 0, 2, 3, 3, 0, 0, 4, 5, 2, 2, 1], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", ["reference", "native"])
def test_adds_each_tokens_own_product(version: str, dtype: torch.dtype) -> None:
    table, op = mixed_table(dtype), add_lora if version == "reference" else NativeAddLora()
    x, out = torch.randn(len(SLOTS), INPUTS).to(dtype), torch.randn(len(SLOTS), sum(SIZES)).to(dtype)
    wanted = expected(x, SLOTS, table, out)
    base = out.clone()
    op(x, SLOTS, table, out)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=tolerance)
    untouched = (SLOTS == 0) | (SLOTS == 5)
    assert torch.equal(out[untouched], base[untouched])


@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_matrices_in_bfloat16_beside_inputs_in_float32(tokens: int) -> None:
    """Bit for bit what the same numbers give in float32: files may be read either way, and results are compared. One
    slot of three has float32."""
    torch.manual_seed(0)
    inputs, sizes = 208, (80, 32, 19)
    kept, widened = (LoraColumns(2, 4, torch.device("cpu")) for _ in range(2))
    for slot, ranks in enumerate(((16, 16, 16), (0, 50, 7), (3, 0, 9)), start=1):
        lora = random_lora(ranks, torch.bfloat16 if slot != 2 else torch.float32, inputs, sizes)
        kept.put(slot, {1: lora})
        widened.put(slot, {1: LinearLora(lora.a.float(), lora.b.float(), lora.ranks, lora.scales)})
    x, slots = torch.randn(tokens, inputs), torch.arange(tokens, dtype=torch.int32).div(7, rounding_mode="floor") % 4
    slots[0] = 1
    found, right = torch.zeros(2, tokens, sum(sizes))
    for columns, out in ((kept, found), (widened, right)):
        NativeAddLora()(x, slots, LoraTable(columns, 1, sizes, inputs), out)
    assert right.any()
    assert torch.equal(found, right)
    by_formula = expected(x, slots, LoraTable(kept, 1, sizes, inputs), torch.zeros_like(found))
    torch.testing.assert_close(found.double(), by_formula, rtol=1e-4, atol=1e-3)


# The interpreter's dot does not know bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16 if interpreted else torch.bfloat16])
@pytest.mark.parametrize("most_rows", [pytest.param(MOST_ROWS, id="by row"), pytest.param(0, id="in tiles")])
def test_triton_adds_each_tokens_own_product(most_rows: int, dtype: torch.dtype) -> None:
    table = mixed_table(dtype, str(device))
    slots = torch.cat((SLOTS, SLOTS.flip(0), SLOTS[:3])).to(device)  # More than one tile, the last one not full.
    x, out = torch.randn(len(slots), INPUTS).to(dtype), torch.randn(len(slots), sum(SIZES)).to(dtype)
    x, out = x.to(device), out.to(device)
    wanted, base = expected(x, slots, table, out), out.clone()
    alone, triton_add_lora = out[3:4].clone(), make_triton(most_rows)
    triton_add_lora(x[3:4], slots[3:4], table, alone)
    triton_add_lora(x, slots, table, out)
    low = 0.06 if most_rows else 1.0  # In tiles x Aᵀ is rounded.
    tolerance = 1e-4 if dtype == torch.float32 else low
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=tolerance)
    untouched = (slots == 0) | (slots == 5)
    assert torch.equal(out[untouched], base[untouched])
    if most_rows:
        assert torch.equal(alone, out[3:4]), "a token does not depend on its neighbours"


@pytest.mark.parametrize("most_rows", [pytest.param(MOST_ROWS, id="by row"), pytest.param(0, id="in tiles")])
@pytest.mark.parametrize("inputs", [1300])
def test_inputs_are_cut_into_slices(inputs: int, most_rows: int) -> None:
    columns = LoraColumns(1, 2, device)
    torch.manual_seed(0)
    columns.put(1, {0: random_lora((3, 17, 0), torch.float32, inputs).to(device)})
    table = LoraTable(columns, 0, SIZES, inputs)
    x, out = torch.randn(5, inputs, device=device), torch.randn(5, sum(SIZES), device=device)
    slots = torch.ones(5, dtype=torch.int32, device=device)
    wanted = expected(x, slots, table, out)
    make_triton(most_rows)(x, slots, table, out)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
def test_a_captured_product_serves_other_adapters() -> None:
    table = mixed_table(torch.bfloat16, "cuda")
    x, out = (torch.randn(len(SLOTS), size, device="cuda").bfloat16() for size in (INPUTS, sum(SIZES)))
    slots, base, triton_add_lora = SLOTS.cuda(), out.clone(), make_triton()
    triton_add_lora(x, slots, table, out)  # Compiles.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_add_lora(x, slots, table, out)
    slots.copy_(SLOTS.flip(0))
    out.copy_(base)
    graph.replay()
    wanted = expected(x, SLOTS.flip(0), table, base)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=0.06)


@pytest.mark.parametrize("tokens", [2, 9, 40])
def test_tokens_of_one_adapter_need_not_be_neighbours(tokens: int) -> None:
    """By turns or one adapter after the other: the same bits."""
    table, op = mixed_table(torch.float32), NativeAddLora()
    x, out = torch.randn(tokens, INPUTS), torch.randn(tokens, sum(SIZES))
    slots = torch.arange(tokens, dtype=torch.int32) % 5
    order = slots.argsort(stable=True)
    sorted_out = out[order].clone()
    op(x, slots, table, out)
    op(x[order].clone(), slots[order].clone(), table, sorted_out)
    assert torch.equal(out[order], sorted_out)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    table, op = mixed_table(torch.float32), NativeAddLora()
    x, out = torch.randn(len(SLOTS), INPUTS), torch.randn(len(SLOTS), sum(SIZES))
    alone = [out[token : token + 1].clone() for token in range(len(SLOTS))]
    for token, own in enumerate(alone):
        op(x[token : token + 1], SLOTS[token : token + 1].clone(), table, own)
    op(x, SLOTS, table, out)
    assert torch.equal(out, torch.cat(alone))


def test_an_emptied_slot_adds_nothing() -> None:
    table, op = mixed_table(torch.float32), NativeAddLora()
    table._columns.put(1, {})  # Slots empty themselves only with their adapters.
    x, out = torch.randn(2, INPUTS), torch.randn(2, sum(SIZES))
    before = out.clone()
    op(x, torch.tensor([1, 1], dtype=torch.int32), table, out)
    assert torch.equal(out, before)


WIDE = (200, 64, 90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (5, 0, 256)])
def test_a_token_of_a_long_run_gets_what_it_gets_alone(dtype: torch.dtype, ranks: tuple[int, ...]) -> None:
    """With one thread and with several: they share runs, rows of A and outputs."""
    torch.manual_seed(0)
    columns, inputs = LoraColumns(1, 3, torch.device("cpu")), 150
    columns.put(1, {0: random_lora(ranks, dtype, inputs, WIDE)})
    columns.put(2, {0: random_lora((0, 3, 0), dtype, inputs, WIDE)})
    table, op = LoraTable(columns, 0, WIDE, inputs), NativeAddLora()
    slots = torch.tensor([1] * 45 + [2] * 9 + [0] * 2 + [1] * 3, dtype=torch.int32)
    x, base = torch.randn(len(slots), inputs).to(dtype), torch.randn(len(slots), sum(WIDE)).to(dtype)
    alone = base.clone()
    for token in range(len(slots)):
        op(x[token : token + 1], slots[token : token + 1].clone(), table, alone[token : token + 1])
    wanted = expected(x, slots, table, base)
    torch.testing.assert_close(
        alone.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3 if dtype.itemsize == 4 else 1
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            native().with_gil.set_threads(threads)
            for count in (1, 2, 7, len(slots)):
                together = base.clone()
                for first in range(0, len(slots), count):
                    some = slice(first, first + count)
                    op(x[some], slots[some].clone(), table, together[some])
                assert torch.equal(together, alone), (threads, count)
    finally:
        native().with_gil.set_threads(before)
