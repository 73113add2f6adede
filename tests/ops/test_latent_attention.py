"""Latent attention in Triton and in C++ against the reference: tiles, parts of a context, groups of heads."""

from __future__ import annotations

import pytest
import torch
from helpers.paged import make_attention_case
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import latent as versions
from millrace.ops.attention.latent import NativeLatentAttention, PagedLatentAttention, ReferenceLatentAttention
from millrace.ops.attention.rows import PlainRows
from millrace.ops.linear.dense import NativeLinear
from millrace.ops.linear.per_head import LoopPerHead, NativePerHead

HALF = torch.float16 if interpreted else torch.bfloat16
"""Triton's interpreter cannot multiply bfloat16."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
MIXED = [(1, 1), (1, 17), (1, 300), (2, 2), (5, 70), (33, 33), (9, 129), (1, 16)]


def compare(
    rows: list[tuple[int, int]],
    heads: int = 4,
    rank: int = 32,
    rope_dim: int = 16,
    dtype: torch.dtype = HALF,
    **how: bool,
) -> None:
    width = rank + rope_dim
    queries, kv, batch = make_attention_case(
        rows, heads=heads, kv_heads=1, head_dim=width, block_size=16, dtype=dtype, device=device
    )
    found = []
    for version in (ReferenceLatentAttention, PagedLatentAttention):
        attention = version(heads, rank, rope_dim, 0.3, **(how if version is PagedLatentAttention else {}))
        found.append(attention(queries, kv[:1], attention.prepare(batch, 16, None)).float())
    assert found[1].shape == (len(queries), heads * rank)
    torch.testing.assert_close(found[1], found[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_mixed_rows(dtype: torch.dtype, is_fixed: bool) -> None:
    compare(MIXED, dtype=dtype, is_fixed=is_fixed)


@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(3, 20, 8), (64, 32, 16), (70, 16, 16), (16, 512, 64)])
def test_sizes(heads: int, rank: int, rope_dim: int) -> None:
    """Several groups of heads; numbers that are no power of two; those of DeepSeek."""
    compare([(1, 70), (3, 40)], heads, rank, rope_dim)


@pytest.mark.parametrize("programs", [1, 8, 1000])
def test_programs_that_share_keys(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one part to more parts than a row has tiles of keys."""
    monkeypatch.setattr(versions, "num_multiprocessors", lambda _: programs)
    compare([(1, 200), (2, 90)], dtype=torch.float32)


# --- in C++ ---


def case_on_cpu(
    rows: list[tuple[int, int]], heads: int, width: int, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, PlainRows]:
    queries, kv, batch = make_attention_case(
        rows, heads=heads, kv_heads=1, head_dim=width, block_size=block_size, dtype=dtype
    )
    return queries, kv[:1].to(kv_dtype), batch


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(3, 20, 8), (6, 48, 16), (70, 16, 16), (16, 512, 64)])
def test_native(heads: int, rank: int, rope_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Sizes in whole vectors, which are read in place, and others; several units of a row."""
    queries, kv, batch = case_on_cpu(MIXED, heads, rank + rope_dim, dtype, kv_dtype)
    native, reference = (
        version(heads, rank, rope_dim, 0.3) for version in (NativeLatentAttention, ReferenceLatentAttention)
    )
    found = native(queries, kv, native.prepare(batch, 16, None))
    assert found.dtype == dtype
    wanted = reference(queries, kv, reference.prepare(batch, 16, None))
    torch.testing.assert_close(found.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_native_sums_depend_on_the_context_alone() -> None:
    """The same queries in a step of their own, and alone in their rows."""
    queries, kv, batch = case_on_cpu([(70, 150)], 5, 48, torch.float32, torch.float32)
    attention = NativeLatentAttention(5, 32, 16, 0.3)
    whole = attention(queries, kv, attention.prepare(batch, 16, None))
    for token in (0, 1, 33, 69):
        alone = PlainRows(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([81 + token], dtype=torch.int32),
            batch.block_tables,
            [0, 1],
            [81 + token],
        )
        found = attention(queries[token : token + 1], kv, attention.prepare(alone, 16, None))
        assert torch.equal(found[0], whole[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_heads_in_one_call_are_those_one_after_the_other(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 24, 20).to(dtype), torch.randn(rows, 6, 33).to(dtype)[:, :, :20]
    native, loop = (make(weight, NativeLinear) for make in (NativePerHead, LoopPerHead))
    assert torch.equal(native(x), loop(x))
