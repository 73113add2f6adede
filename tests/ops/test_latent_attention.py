"""Latent attention in Triton against the reference: tiles, parts of a context, groups of heads."""

from __future__ import annotations

import pytest
import torch
from helpers.paged import make_attention_case
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import latent as versions
from millrace.ops.attention.latent import PagedLatentAttention, ReferenceLatentAttention

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
