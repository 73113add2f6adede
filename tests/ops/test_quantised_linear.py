"""Linear layers over stored weights: bit-identical to dequantised weights, for every format and size."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.stored_blocks import dequantised, random_blocks
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.models.formats.gguf import TERNARY, weight_of_blocks
from millrace.ops.cpp.native import native
from millrace.ops.head.embedding import NativeTiedEmbedding
from millrace.ops.linear.dense import NativeLinear
from millrace.ops.linear.stored import FORMATS, StoredLinear, StoredPart, StoredWeight, pack_stored, packed_bytes

ROWS = (1, 2, 7, 16, 17, 32, 33, 100, 150)
DTYPES = (torch.float32, torch.bfloat16)


def pair(
    kinds: list[str], sizes: list[int], columns: int, dtype: torch.dtype, with_bias: bool = False, seed: int = 0
) -> tuple[StoredLinear, NativeLinear, torch.Tensor]:
    """The same layer over stored and over dequantised weights, and the dequantised weights."""
    blocks = [random_blocks(kind, n, columns, seed + i) for i, (kind, n) in enumerate(zip(kinds, sizes, strict=True))]
    parts = [
        StoredPart(kind, n, pack_stored(kind, own, n, columns))
        for kind, n, own in zip(kinds, sizes, blocks, strict=True)
    ]
    weight = torch.cat([dequantised(kind, own, columns, dtype) for kind, own in zip(kinds, blocks, strict=True)])
    torch.manual_seed(seed)
    bias = torch.randn(sum(sizes)).to(dtype) if with_bias else None
    return StoredLinear(StoredWeight(tuple(parts), columns, dtype), bias), NativeLinear(weight, bias), weight


def block_items(kind: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[T[kind]][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_results_equal_those_of_the_dequantised_weight(kind: str, dtype: torch.dtype) -> None:
    for outputs, columns in ((64, 256), (33, 512), (16, 768), (1, 256), (130, 1024)):
        stored, plain, _ = pair([kind], [outputs], columns, dtype, with_bias=outputs % 2 == 1)
        for rows in ROWS:
            x = torch.randn(rows, columns).to(dtype)
            assert torch.equal(stored(x), plain(x)), (outputs, columns, rows)


@settings(max_examples=examples(20))
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    blocks=st.integers(1, 5),
    outputs=st.integers(1, 100),
    rows=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_size(kind: str, blocks: int, outputs: int, rows: int, dtype: torch.dtype, seed: int) -> None:
    columns = blocks * block_items(kind)
    stored, plain, weight = pair([kind], [outputs], columns, dtype, seed=seed)
    x = torch.randn(rows, columns).to(dtype)
    assert torch.equal(stored(x), plain(x))
    assert torch.equal(stored.take_rows(torch.arange(outputs)), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_equal_the_dequantised_ones(kind: str, dtype: torch.dtype) -> None:
    stored, _, weight = pair([kind], [45], 512, dtype)
    ids = torch.tensor([44, 0, 7, 7, 31, 16])
    wanted = weight[ids] + 0.0 if kind in TERNARY else weight[ids]  # Rewritten, they have no -0.
    assert torch.equal(stored.take_rows(ids).view(torch.uint8), wanted.view(torch.uint8))
    for wrong in (-1, 45):
        with pytest.raises(IndexError, match=f"token id {wrong} "):
            stored.take_rows(torch.tensor([3, wrong]))


@pytest.mark.parametrize("kind", TERNARY)
def test_ternary_numbers_on_a_gpu_are_rewritten(kind: str) -> None:
    blocks = random_blocks(kind, 5, 512)
    kept = weight_of_blocks(kind, torch.from_numpy(blocks), 512, torch.bfloat16)
    assert kept.num_bytes == 5 * 512 * 84 // 256
    assert torch.equal(kept.dequantised(), dequantised(kind, blocks, 512, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_in_different_formats_form_one_layer(dtype: torch.dtype) -> None:
    kinds, sizes = ["Q4_K", "Q6_K", "Q8_0", "Q5_1"], [96, 33, 7, 64]
    stored, plain, weight = pair(kinds, sizes, 512, dtype, with_bias=True)
    assert stored.out_features == 200
    for rows in ROWS:
        x = torch.randn(rows, 512).to(dtype)
        assert torch.equal(stored(x), plain(x))
    ids = torch.tensor([0, 95, 96, 128, 129, 135, 136, 199])
    assert torch.equal(stored.take_rows(ids), weight[ids])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_row_does_not_depend_on_the_batch(kind: str) -> None:
    stored, _, _ = pair([kind], [576], 1536, torch.bfloat16)
    x = torch.randn(300, 1536).bfloat16()
    whole = stored(x)
    for first, rows in ((0, 1), (5, 1), (0, 2), (31, 3), (100, 16), (17, 33), (8, 64), (0, 129), (40, 257)):
        assert torch.equal(stored(x[first : first + rows]), whole[first : first + rows])


def test_rows_of_any_stride() -> None:
    for dtype in DTYPES:
        stored, plain, _ = pair(["Q5_K"], [40], 256, dtype)
        for width in (257, 300):  # rows of bfloat16 with an odd stride are not aligned
            x = torch.randn(20, width).to(dtype)[:, :256]
            assert torch.equal(stored(x), plain(x.contiguous()))


def test_large_layers_use_several_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        native()
        stored, plain, _ = pair(["Q4_K"], [3000], 1024, torch.bfloat16)
        for rows in (1, 5, 40, 200):
            x = torch.randn(rows, 1024).bfloat16()
            assert torch.equal(stored(x), plain(x))
    finally:
        torch.set_num_threads(threads)
        native()


def test_tied_embedding_looks_up_rows_and_computes_logits() -> None:
    blocks = random_blocks("Q6_K", 97, 256)
    weight = dequantised("Q6_K", blocks, 256, torch.bfloat16)
    part = StoredPart("Q6_K", 97, pack_stored("Q6_K", blocks, 97, 256))
    tied = NativeTiedEmbedding(StoredWeight((part,), 256, torch.bfloat16))
    ids = torch.tensor([96, 1])
    assert torch.equal(tied.rows(ids), weight[ids])
    x = torch.randn(3, 256).bfloat16()
    assert torch.equal(tied.head(x), NativeLinear(weight)(x))


def test_packed_size_is_that_of_the_file_plus_padding() -> None:
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"):
        assert packed_bytes(kind, 64, 1024) == random_blocks(kind, 64, 1024).nbytes
    for kind in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS"):
        assert packed_bytes(kind, 64, 1024) <= 1.03 * random_blocks(kind, 64, 1024).nbytes


def test_descriptor_lists_the_parts() -> None:
    stored, _, _ = pair(["Q4_1", "Q8_0"], [32, 17], 64, torch.bfloat16, with_bias=True)
    desc = stored.native
    assert (desc.n, desc.k, desc.num_parts, desc.dtype) == (49, 64, 2, 1)
    assert [(desc.parts[i].n, desc.parts[i].format) for i in range(2)] == [(32, 3), (17, 6)]
