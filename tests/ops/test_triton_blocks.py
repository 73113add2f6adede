"""Products with the blocks of GGUF files on a GPU, against gguf-py's own numbers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.stored_blocks import random_blocks
from helpers.triton_mode import device, interpreted

from millrace.ops.head.embedding import KeptTiedEmbedding
from millrace.ops.linear.block_weight import BlocksTriton, BlockWeight, join_blocks
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.triton.blocks.decode import KINDS
from millrace.ops.triton.blocks.product import decode, operand

# Triton's interpreter multiplies the bits of bfloat16 as integers.
DTYPE = torch.float16 if interpreted else torch.bfloat16


def weight_of(kind: str, rows: int = 24, columns: int = 256, seed: int = 0) -> tuple[BlockWeight, torch.Tensor]:
    """The weight, and what gguf-py says that it holds."""
    blocks = random_blocks(kind, rows, columns, seed)
    with np.errstate(all="ignore"):
        values = torch.from_numpy(gguf.quants.dequantize(blocks, T[kind])).to(device)
    return BlockWeight(kind, torch.from_numpy(blocks).to(device), columns, DTYPE), values


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_format(kind: str) -> None:
    assert (KINDS[kind].items, KINDS[kind].num_bytes) == gguf.GGML_QUANT_SIZES[T[kind]]
    assert KINDS[kind].code == T[kind].value


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_means_what_its_authors_say(kind: str) -> None:
    weight, values = weight_of(kind)
    found = decode(operand(kind, weight.blocks, weight.in_features), torch.float32)
    torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6 * float(values.abs().max()))
    assert torch.equal(weight.dequantised(), values)
    assert torch.equal(weight.dequantised(3, 9), values[3:9])


@pytest.mark.parametrize("kind", ["Q5_1", "Q4_K", "IQ2_XS"])
def test_products_of_few_and_many_rows(kind: str) -> None:
    weight, values = weight_of(kind)
    bias = torch.randn(24).to(device, DTYPE)
    linear, fixed = BlocksTriton(weight, bias), BlocksTriton(weight, bias, is_fixed=True)
    for rows in (0, 3, 70):
        x = torch.randn(rows, 256).to(device, DTYPE)
        wanted = x.double() @ values.double().T + bias.double()
        for found in (linear(x), linear.wide(x), fixed(x)):
            assert found.shape == (rows, 24)
            if rows:
                assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-2
    assert linear.num_bytes == weight.num_bytes + bias.nbytes
    assert torch.equal(fixed(x)[:3], fixed(x[:3]))


def test_a_row_ends_within_a_tile() -> None:
    weight, values = weight_of("Q5_0", rows=33, columns=160)
    x = torch.randn(2, 160).to(device, DTYPE)
    wanted = x.double() @ values.double().T
    assert float((BlocksTriton(weight)(x).double() - wanted).norm() / wanted.norm()) < 1e-2


def test_weights_of_one_format_are_joined() -> None:
    first, second = weight_of("Q4_K")[0], weight_of("Q4_K", rows=8, seed=1)[0]
    joined = join_blocks([first, second])
    assert isinstance(joined, BlockWeight)
    assert torch.equal(joined.dequantised(), torch.cat([first.dequantised(), second.dequantised()]))
    assert isinstance(join_blocks([first, weight_of("Q6_K")[0]]), tuple)


def test_an_embedding_looks_up_rows_of_the_stored_matrix() -> None:
    blocks, values = weight_of("Q5_1")
    scales = torch.rand(12, 2, device=device).half()
    codes = torch.randint(0, 256, (24, 32), dtype=torch.uint8, device=device)
    grouped = GroupedWeight(codes, scales, 64, 32, DTYPE, rows_per_scale=2, zero=8)
    ids = torch.tensor([5, 0, 23, 5], device=device)
    for weight, wanted in ((blocks, values), (grouped, grouped.dequantised())):
        tied = KeptTiedEmbedding(weight)
        assert tied.rows.matrix is None
        assert torch.equal(tied.rows(ids), wanted[ids].to(DTYPE))
        x = torch.randn(2, weight.in_features).to(device, DTYPE)
        expected = x.double() @ wanted.double().T
        assert float((tied.head.wide(x).double() - expected).norm() / expected.norm()) < 1e-2
