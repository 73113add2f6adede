"""The greedy LM head, which keeps only the largest logit: equals product and argmax on a GPU, compiles on any machine,
and picks the best result of all programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.gpu_compiler import output_of
from helpers.triton_mode import device, interpreted
from torch import Tensor

from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.linear.dense import TunedLinear
from millrace.ops.triton.gemm import choice as gemm_choice
from millrace.ops.tuning.load import ANY_ROWS, read_product_table

COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from millrace.ops.triton.gemm import greedy_head as room, operand_ring

kernel = room.greedy_head_kernel
for rows, tokens, stages in json.loads(sys.argv[1]):
    blocks = {"x_desc": (rows, 64), "w_desc": (tokens, 64)}
    constants = {"ROWS": rows, "TOKENS": tokens, "BLOCK_K": 64, "STAGES": stages, "FETCHING_REGISTERS": 24}
    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    signature |= {"best_ptr": "*fp32", "token_ptr": "*i32"}
    for name, block in blocks.items():
        signature[name] = f"tensordesc<bf16{list(block)},{operand_ring._layout(*block)!r}>"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    print("wide", "wgmma.mma_async.sync.aligned.m64n" in built.asm["ptx"], built.metadata.shared <= 227 << 10)
"""

TABLE = read_product_table("h200", "gemm", "greedy_head")
TILES = sorted({tile for entries in TABLE.values() for tile in entries.values() if tile is not None})


@pytest.mark.live
def test_the_kernel_compiles_to_the_warpgroup_instruction() -> None:
    pytest.importorskip("triton.experimental.gluon")
    assert output_of(COMPILE, json.dumps(TILES)).splitlines()[: len(TILES)] == ["wide True True"] * len(TILES)


def test_every_number_of_rows_has_an_entry() -> None:
    assert all(max(entries) == ANY_ROWS for entries in TABLE.values())


def test_without_a_gpu_there_is_no_table() -> None:
    if not interpreted:
        pytest.skip("there is a GPU")
    assert gemm_choice.measured_head(torch.zeros(151936, 1024, dtype=torch.bfloat16), None).of(64) is None


def drawn(rows: list[int]) -> DrawnTokens:
    table = torch.full((2 * len(rows) + 1,), -5, dtype=torch.int64, device=device)
    return DrawnTokens(
        rows=torch.tensor(rows, dtype=torch.int32, device=device),
        out=torch.full((len(rows) + 3,), -7, dtype=torch.int32, device=device),
        out_start=torch.tensor([3], dtype=torch.int32, device=device),
        out_index=torch.arange(len(rows), dtype=torch.int32, device=device),
        last_tokens=table,
    )


def test_the_best_of_all_programs_is_picked_and_ties_go_to_the_lowest_token() -> None:
    from millrace.ops.triton.gemm.greedy_head import pick

    best = torch.tensor([[1.0, 2.0, -torch.inf, 9.0], [3.0, 2.0, -torch.inf, 0.0], [3.0, 2.0, -torch.inf, 0.0]])
    token = torch.tensor([[5, 300, 0, 1], [200, 600, 0, 2], [100, 900, 0, 3]], dtype=torch.int32)
    to = drawn([4, 0, 6, -1])
    pick(best.to(device), token.to(device), to)
    assert to.out.tolist() == [-7, -7, -7, 100, 300, 0, -7]
    assert to.last_tokens.tolist() == [300, -5, -5, -5, 100, -5, 0, -5, -5]


def test_tokens_go_to_their_index() -> None:
    from millrace.ops.triton.gemm.greedy_head import pick

    to = replace(drawn([0, 1, -1]), out_index=torch.tensor([2, 0, 1], dtype=torch.int32, device=device))
    pick(torch.zeros(1, 3, device=device), torch.tensor([[7, 8, 9]], dtype=torch.int32, device=device), to)
    assert to.out.tolist() == [-7, -7, -7, 8, -7, 7]


def operands(rows: int, vocab: int, inputs: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows * vocab + inputs)
    x = torch.randn(rows, inputs, device=device).bfloat16()
    return x, (torch.randn(vocab, inputs, device=device) * inputs**-0.5).bfloat16()


def check(x: Tensor, weight: Tensor, vocab: int, tile: tuple[int, int, int]) -> None:
    """Tokens equal those of exact sums, except where two logits are closer than the rounding error."""
    from millrace.ops.triton.gemm.greedy_head import HeadTile, greedy_head

    count = x.shape[0]
    to = drawn([2 * count - 2 * row for row in range(count)])
    greedy_head(x, weight, HeadTile(*tile), to, vocab)
    logits = x.double() @ weight[:vocab].double().T
    top, got = logits.max(1), to.out[3:].long()
    assert (to.out[:3] == -7).all()
    assert (logits.gather(1, got[:, None])[:, 0] >= top.values - 1e-4).all()
    assert (got == top.indices).float().mean() > 0.99
    assert torch.equal(to.last_tokens[to.rows.long()], got)
    assert (to.last_tokens == -5).sum() == count + 1


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("rows", "vocab", "inputs"),
    [
        (1, 32, 64),
        (17, 1000, 128),
        (64, 256, 64),
        (65, 257, 192),
        (200, 50257, 768),
        (512, 151936, 1024),
        (33, 128256, 4096),
    ],
)
def test_the_kernel_equals_product_and_argmax(rows: int, vocab: int, inputs: int, tile: tuple[int, int, int]) -> None:
    x, weight = operands(rows, vocab, inputs)
    check(x, weight, vocab, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_padding_ties_and_nan(tile: tuple[int, int, int]) -> None:
    x, weight = operands(70, 5000, 128)
    weight[4990:] = weight[:1] * 50  # beyond the vocabulary
    check(x, weight, 4990, tile)
    from millrace.ops.triton.gemm.greedy_head import HeadTile, greedy_head

    weight[:] = 0
    weight[[77, 78, 3000], :] = 1
    x[:] = 1
    x[3] = -1
    x[4] = torch.nan
    weight[4000] = torch.nan
    to = drawn(list(range(70)))
    greedy_head(x, weight, HeadTile(*tile), to, 5000)
    # Row 3: all logits but three are 0. Row 4: all logits are NaN.
    assert to.out[3:].tolist() == [77, 77, 77, 0, 0, *[77] * 65]


@pytest.mark.gpu
def test_repeated_draws_are_equal_and_the_lm_head_uses_the_kernel() -> None:
    x, weight = operands(160, 151936, 1024)
    head = TunedLinear(weight)
    assert head.draws(160)
    assert not head.draws(1)
    assert not TunedLinear(weight, torch.zeros(151936, device=device).bfloat16()).draws(160)
    first = drawn(list(range(160)))
    head.draw(x, 151936, first)
    for _ in range(20):
        again = drawn(list(range(160)))
        head.draw(x, 151936, again)
        assert torch.equal(again.out, first.out)
