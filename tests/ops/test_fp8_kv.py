"""The FP8 KV cache: writes, reads, and how close attention is to the plain cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.paged import make_attention_case, make_tiled, rewritten
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import PagedAttention, ReferenceAttention
from millrace.ops.attention.decode_rule import LIST_COLUMNS
from millrace.ops.attention.qkv import TorchPrepareQkv
from millrace.ops.base.quantised import FP8_MAX
from millrace.ops.kv.cache import SCALE_BYTES, fp8_parts, read_kv, write_kv
from millrace.ops.triton.attention.long_rows import contiguous_kv
from millrace.ops.triton.attention.prefill import (
    AttentionShape,
    DecodeTuning,
    PagedRows,
    SplitWorkspace,
    decode,
)
from millrace.ops.triton.attention.qkv import PrepareQkvKernel
from millrace.run.packet.decode_rows import num_words, write_decode_rows

HALF = torch.float16 if interpreted else torch.bfloat16
STEP = 2.0**-4
"""Half of the widest step between neighbouring float8 numbers, relative to the number."""
SAME = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Tolerance between two versions that read the same FP8 cache."""


def empty_fp8(kv: torch.Tensor) -> torch.Tensor:
    """A cache for the same tokens, every byte 255: NaN as an item and as a scale."""
    return torch.full((*kv.shape[:4], kv.shape[4] + SCALE_BYTES), 255, dtype=torch.uint8, device=kv.device)


def in_fp8(kv: torch.Tensor) -> torch.Tensor:
    """The same cache in FP8; unwritten entries stay unwritten."""
    return rewritten(kv, empty_fp8(kv))


def test_the_rounding_error_is_at_most_half_a_step() -> None:
    torch.manual_seed(1)
    sizes = 10.0 ** torch.randint(-6, 6, (7, 2, 3, 1))
    tokens = torch.randn(7, 2, 3, 32) * sizes
    tokens[2] = 0.0
    kv = torch.zeros((2, 4, 3, 8, 32 + SCALE_BYTES), dtype=torch.uint8)
    slots = torch.tensor([3, 9, 10, 17, 24, 25, 31])
    write_kv(tokens, kv, slots // 8, slots % 8)
    found = read_kv(kv, torch.arange(4)).permute(1, 3, 0, 2, 4).flatten(0, 1)[slots]
    smallest = tokens.abs().amax(-1, keepdim=True) / FP8_MAX * 2.0**-10
    assert ((found - tokens).abs() <= torch.maximum(tokens.abs() * STEP, smallest)).all()
    assert torch.equal(found[2], torch.zeros_like(found[2]))


def test_writing_a_token_changes_only_its_items_and_scale() -> None:
    kv = torch.zeros((2, 3, 2, 4, 16 + SCALE_BYTES), dtype=torch.uint8)
    write_kv(torch.ones(1, 2, 2, 16), kv, torch.tensor([1]), torch.tensor([2]))
    items, scales = fp8_parts(kv)
    assert items.data_ptr() == kv.data_ptr()
    assert (scales[:, 1, :, 2] == 1.0 / FP8_MAX).all()
    assert int((kv != 0).any(-1).sum()) <= 2 * 2 * 4
    scales[:, 1, :, 2] = 0
    items.view(torch.uint8)[:, 1, :, 2] = 0
    assert not kv.any()


@pytest.mark.parametrize(("rotary", "norm"), [(16, True), (8, False), (0, False)])
def test_the_kernel_writes_the_same_as_the_reference(rotary: int, norm: bool) -> None:
    torch.manual_seed(2)
    heads, kv_heads, head_dim, tokens = 4, 2, 16, 5
    weights = [torch.rand(head_dim, device=device) + 0.5 if norm else None for _ in range(2)]
    sizes = (heads, kv_heads, head_dim, 1e-6, *weights)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=torch.float32, device=device)
    angles = torch.randn(tokens, rotary // 2, device=device)
    rows = torch.cat((angles.cos(), angles.sin()), 1) if rotary else None
    slots = torch.tensor([5, 16, 17, 40, 63], device=device)
    wide = torch.zeros((2, 4, kv_heads, 16, head_dim), device=device)
    expected, found = empty_fp8(wide), empty_fp8(wide)
    TorchPrepareQkv(*sizes)(qkv.clone(), rows, expected, slots // 16, slots % 16)
    queries = PrepareQkvKernel(*sizes)(qkv.clone(), rows, found, slots // 16, slots % 16)
    assert queries.dtype == torch.float32
    touched = (expected != 255).any(-1)
    assert torch.equal(touched, (found != 255).any(-1))
    blocks = slots // 16
    one, two = (read_kv(kv, blocks)[:, torch.arange(tokens), :, slots % 16] for kv in (expected, found))
    # A tie rounded the other way is one float8 step apart. Triton's interpreter also loses the
    # carry of a mantissa that rounds up to the next power of two.
    apart = (two - one).abs() > 2 * STEP * one.abs() + 1e-3
    assert int(apart.sum()) <= (one.numel() // 20 if interpreted else 0)
    assert torch.equal(fp8_parts(expected)[1].isnan(), fp8_parts(found)[1].isnan())
    torch.testing.assert_close(fp8_parts(found)[1], fp8_parts(expected)[1], equal_nan=True)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": torch.float32},
    "one head of keys": {"heads": 3, "kv_heads": 1},
    "head of 80": {"head_dim": 80},
    "odd block": {"block_size": 3},
}


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_paged_attention_equals_the_reference(name: str, tiled: bool) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": HALF, **CASES[name]}
    rows = [(1, 70), (1, 33), (5, 40), (33, 33)]
    queries, kv, batch = make_attention_case(rows, device=device, **sizes)
    arguments = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"], 0.3)
    narrow = in_fp8(kv)

    def attend(version: Any, cache: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = version(queries, cache, version.prepare(batch, cache.shape[3], None))
        return result.float()

    wide = attend(ReferenceAttention(*arguments), kv)
    expected = attend(ReferenceAttention(*arguments), narrow)
    found = attend(PagedAttention(*arguments, tile_decode_rows=tiled), narrow)
    tolerance = SAME[sizes["dtype"]]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert float((expected - wide).norm() / wide.norm()) < STEP


@pytest.mark.parametrize("shared", [128])
def test_a_shared_prefix(shared: int) -> None:
    lengths = [shared + 1, shared + 40]
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": HALF}
    queries, kv, batch = make_attention_case([(1, length) for length in lengths], device=device, **sizes)
    batch.block_tables[1, : shared // 16] = batch.block_tables[0, : shared // 16]
    narrow = in_fp8(kv)
    reference = ReferenceAttention(4, 2, 16, 0.3)
    expected = reference(queries, narrow, reference.prepare(batch, 16, None))
    tiled = make_tiled(batch, shared_len=torch.tensor([shared], dtype=torch.int32, device=device))
    paged = PagedAttention(4, 2, 16, 0.3)
    found = paged(queries, narrow, paged.prepare(tiled, 16, None))
    torch.testing.assert_close(found.float(), expected.float(), atol=SAME[HALF], rtol=SAME[HALF])


def test_listed_rows() -> None:
    """Decode rows from a list, the longest one split."""
    lengths, sizes = [20, 1200, 70], {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": HALF}
    queries, kv, batch = make_attention_case([(1, length) for length in lengths], device=device, **sizes)
    narrow, reference, rows = in_fp8(kv), ReferenceAttention(4, 2, 16, 0.3), np.arange(3)
    expected = reference(queries, narrow, reference.prepare(batch, 16, None))
    words = np.zeros(num_words(3), np.int32)
    write_decode_rows(words, rows, rows, np.array(lengths, np.int32))
    listed = torch.from_numpy(words.reshape(LIST_COLUMNS, -1)).to(device)
    table_rows = torch.arange(3, dtype=torch.int32, device=device)
    paged, shape = (
        PagedRows(batch.query_starts, batch.seq_lens, table_rows, batch.block_tables),
        AttentionShape(4, 2, 16, 0.3),
    )
    found, workspace = torch.full_like(expected, float("nan")), SplitWorkspace(64, shape, queries.device)
    decode(queries, narrow, found, paged, shape, workspace, DecodeTuning(splits=8), listed=listed)
    torch.testing.assert_close(found.float(), expected.float(), atol=SAME[HALF], rtol=SAME[HALF])


def test_gathered_keys_and_values_are_widened() -> None:
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 32, "block_size": 16, "dtype": HALF}
    _, kv, batch = make_attention_case([(1, 70)], device=device, **sizes)
    narrow = in_fp8(kv)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    rows = PagedRows(batch.query_starts, batch.seq_lens, one, batch.block_tables)
    found = contiguous_kv(narrow, rows, 0, 69, AttentionShape(2, 2, 32, 1.0), torch.float32)
    expected = read_kv(narrow, batch.block_tables[0].long()).permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :69]
    torch.testing.assert_close(found, expected)
