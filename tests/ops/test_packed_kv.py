"""Attention over a packed KV cache: writes, reads, and results equal to a plain cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.paged import make_attention_case, make_tiled, rewritten
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import PagedAttention, PlainRows, ReferenceAttention
from millrace.ops.attention.decode_rule import LIST_COLUMNS
from millrace.ops.attention.qkv import TorchPrepareQkv
from millrace.ops.kv.cache import SCALE_WORDS, packed_parts, read_kv, write_kv
from millrace.ops.kv.packed import packed_items
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

BF16 = torch.bfloat16
DTYPE = torch.float32 if interpreted else BF16
"""Dtype of queries: Triton's interpreter cannot multiply bfloat16. Keys and values are bfloat16 numbers anyway."""
SAME = 2e-2
UNWRITTEN = 0x7FC1
"""Word of an unwritten entry; two of them are NaN as a scale."""


def attention_case(rows: list[tuple[int, int]], **sizes: Any) -> tuple[torch.Tensor, torch.Tensor, PlainRows]:
    queries, kv, batch = make_attention_case(rows, device=device, dtype=BF16, **sizes)
    return queries.to(DTYPE), kv.to(DTYPE), batch


def empty_packed(kv: torch.Tensor) -> torch.Tensor:
    return torch.full(
        (*kv.shape[:4], packed_items(kv.shape[4]) + SCALE_WORDS), UNWRITTEN, dtype=torch.int16, device=kv.device
    )


def in_packed(kv: torch.Tensor) -> torch.Tensor:
    """The same cache, packed; unwritten entries stay unwritten."""
    return rewritten(kv, empty_packed(kv))


def fused(queries: torch.Tensor, kv: torch.Tensor, batch: Any) -> torch.Tensor:
    """The queries as a view of a projection that also holds the keys and values of the step's own tokens."""
    block_size, kv_heads = kv.shape[3], kv.shape[2]
    tokens, heads, head_dim = queries.shape
    projection = torch.full((tokens, heads + 2 * kv_heads, head_dim), float("nan"), dtype=kv.dtype, device=kv.device)
    projection[:, :heads] = queries
    starts = batch.query_starts_host
    for row, length in enumerate(batch.seq_lens_host):
        count = starts[row + 1] - starts[row]
        positions = torch.arange(length - count, length, device=kv.device)
        blocks = batch.block_tables[row].long()[positions // block_size]
        own = kv[:, blocks, :, positions % block_size]  # [tokens, 2, kv_heads, head_dim]
        projection[starts[row] : starts[row + 1], heads:] = own.flatten(1, 2)
    return projection[:, :heads]


@pytest.mark.parametrize(("norm", "rotary"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernel_writes_the_same_as_the_reference(head_dim: int, norm: bool, rotary: bool) -> None:
    torch.manual_seed(2)
    heads, kv_heads, tokens = 3, 2, 5
    weights = [torch.rand(head_dim, device=device) + 0.5 if norm else None for _ in range(2)]
    sizes = (heads, kv_heads, head_dim, 1e-6, *weights)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=BF16, device=device)
    qkv[1, heads * head_dim :: 7] *= 2.0**-20
    qkv[2, -head_dim:] = 0.0
    angles = torch.randn(tokens, head_dim // 2, device=device)
    rows = torch.cat((angles.cos(), angles.sin()), 1) if rotary else None
    slots = torch.tensor([5, 16, 17, 40, 63], device=device)
    wide = torch.zeros((2, 4, kv_heads, 16, head_dim), device=device)
    expected, found = empty_packed(wide), empty_packed(wide)
    projection = qkv.clone()
    TorchPrepareQkv(*sizes)(qkv.clone(), rows, expected, slots // 16, slots % 16)
    PrepareQkvKernel(*sizes)(projection, rows, found, slots // 16, slots % 16)
    assert torch.equal((expected != UNWRITTEN).any(-1), (found != UNWRITTEN).any(-1))
    # The cache holds the projection's keys and values, packed, and is close to the reference's.
    own = projection.view(tokens, -1, head_dim)[:, heads:].unflatten(1, (2, kv_heads))
    again = empty_packed(wide)
    write_kv(own, again, slots // 16, slots % 16)
    assert torch.equal(found, again)
    one, two = (read_kv(kv, slots // 16)[:, torch.arange(tokens), :, slots % 16] for kv in (expected, found))
    torch.testing.assert_close(two, one, atol=2e-2, rtol=1e-2)
    assert torch.equal(packed_parts(found)[1].isnan(), packed_parts(expected)[1].isnan())


def test_partly_rotated_heads_are_refused() -> None:
    kv = torch.zeros((2, 2, 1, 16, packed_items(64) + SCALE_WORDS), dtype=torch.int16, device=device)
    qkv, one = torch.zeros(1, 3 * 64, dtype=BF16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="all of it rotated"):
        PrepareQkvKernel(1, 1, 64, 1e-6, None, None)(qkv, torch.zeros(1, 32, device=device), kv, one, one)


CASES: dict[str, dict[str, Any]] = {
    "heads of 64": {},
    "heads of 128": {"head_dim": 128},
    "heads of 256": {"head_dim": 256, "rows": [(1, 40), (3, 20)]},
    "one head of keys": {"heads": 3, "kv_heads": 1},
    "odd block": {"block_size": 3, "rows": [(1, 70), (5, 40)]},
    "window": {"window": 20},
    "prompts in chunks": {"rows": [(70, 70), (66, 90), (2, 67), (40, 200), (1, 1)]},
    "prompts in chunks, window": {"rows": [(70, 70), (66, 90), (2, 67)], "window": 33},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("name", CASES)
def test_paged_attention_equals_that_over_a_plain_cache(name: str) -> None:
    case = {"heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 16, **CASES[name]}
    window, softcap = case.pop("window", None), case.pop("softcap", None)
    rows = case.pop("rows", [(1, 70), (1, 33), (5, 40), (33, 33)])
    queries, kv, batch = attention_case(rows, **case)
    arguments = (case["heads"], case["kv_heads"], case["head_dim"], 0.2, softcap)
    reference, paged = ReferenceAttention(*arguments), PagedAttention(*arguments)
    expected = reference(queries, kv, reference.prepare(batch, case["block_size"], window)).float()
    packed = in_packed(kv)
    found = paged(fused(queries, kv, batch), packed, paged.prepare(batch, case["block_size"], window)).float()
    torch.testing.assert_close(found, expected, atol=SAME, rtol=SAME)


@pytest.mark.parametrize("splits", [1, 3])
def test_listed_rows(splits: int) -> None:
    """Decode rows from a list, the longest one split."""
    lengths, sizes = [20, 600, 70], {"heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 16}
    queries, kv, batch = attention_case([(1, length) for length in lengths], **sizes)
    packed, reference, rows = in_packed(kv), ReferenceAttention(4, 2, 64, 0.2), np.arange(3)
    expected = reference(queries, kv, reference.prepare(batch, 16, None))
    words = np.zeros(num_words(3), np.int32)
    write_decode_rows(words, rows, rows, np.array(lengths, np.int32))
    listed = torch.from_numpy(words.reshape(LIST_COLUMNS, -1)).to(device) if splits == 1 else None
    table_rows = torch.arange(3, dtype=torch.int32, device=device)
    paged = PagedRows(batch.query_starts, batch.seq_lens, table_rows, batch.block_tables)
    shape = AttentionShape(4, 2, 64, 0.2)
    found, workspace = torch.full_like(expected, float("nan")), SplitWorkspace(64, shape, queries.device)
    tuning = DecodeTuning(splits=splits)
    decode(queries, packed, found, paged, shape, workspace, tuning, listed=listed, all_single=True)
    torch.testing.assert_close(found.float(), expected.float(), atol=SAME, rtol=SAME)


def test_a_shared_prefix() -> None:
    shared = 128
    lengths = [shared + 1, shared + 40]
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 16}
    queries, kv, batch = attention_case([(1, length) for length in lengths], **sizes)
    batch.block_tables[1, : shared // 16] = batch.block_tables[0, : shared // 16]
    reference = ReferenceAttention(4, 2, 64, 0.2)
    expected = reference(queries, kv, reference.prepare(batch, 16, None))
    tiled = make_tiled(batch, shared_len=torch.tensor([shared], dtype=torch.int32, device=device))
    paged = PagedAttention(4, 2, 64, 0.2)
    found = paged(queries, in_packed(kv), paged.prepare(tiled, 16, None))
    torch.testing.assert_close(found.float(), expected.float(), atol=SAME, rtol=SAME)


def test_gathered_keys_and_values_are_unchanged() -> None:
    _, kv, batch = attention_case([(1, 70)], heads=2, kv_heads=2, head_dim=64, block_size=16)
    packed = in_packed(kv)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    rows = PagedRows(batch.query_starts, batch.seq_lens, one, batch.block_tables)
    found = contiguous_kv(packed, rows, 0, 69, AttentionShape(2, 2, 64, 1.0), BF16)
    expected = read_kv(packed, batch.block_tables[0].long()).permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :69]
    assert torch.equal(found.float(), expected)


def test_queries_outside_the_fused_projection_are_refused() -> None:
    queries, kv, batch = attention_case([(5, 40)], heads=4, kv_heads=2, head_dim=64, block_size=16)
    paged = PagedAttention(4, 2, 64, 0.2)
    with pytest.raises(ValueError, match="fused projection"):
        paged(queries.contiguous(), in_packed(kv), paged.prepare(batch, 16, None))
