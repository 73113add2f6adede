"""Every attention version against the reference: ragged rows, odd sizes, windows, soft caps; unused slots are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.paged import make_attention_case, make_rows
from helpers.suite import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.ops.attention import BatchedAttention, NativeAttention, PlainRows, ReferenceAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
FAST = {"batched": BatchedAttention, "native": NativeAttention}


def attend(
    version: Any,
    case: tuple[torch.Tensor, torch.Tensor, PlainRows],
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    queries, kv, batch = case
    result: torch.Tensor = version(queries, kv, version.prepare(batch, kv.shape[3], window), sinks)
    return result


def compare(name: str, rows: list[tuple[int, int]], window: int | None = None, **sizes: Any) -> None:
    softcap, scale = sizes.pop("softcap", None), sizes.pop("scale", 0.3)
    sinks = torch.linspace(-3, 6, sizes["heads"]) if sizes.pop("has_sinks", False) else None
    case = make_attention_case(rows, **sizes)
    arguments = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"], scale, softcap)
    expected = attend(ReferenceAttention(*arguments), case, window, sinks)
    found = attend(FAST[name](*arguments), case, window, sinks)
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[sizes["dtype"]]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


SIZES: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 16, "block_size": 4, "dtype": torch.float32}


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=examples(20))
@example(  # three blocks with consecutive ids
    rows=[(1, 49)],
    kv_heads=2,
    group=1,
    head_dim=64,
    block_size=7,
    window=None,
    softcap=None,
    dtype=torch.bfloat16,
    has_sinks=True,
    seed=0,
)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 5, 8, 17]),
    head_dim=st.sampled_from([8, 16, 20, 64, 80, 96, 128]),
    block_size=st.sampled_from([1, 3, 7, 16, 32, 100]),
    window=st.sampled_from([None, 1, 2, 7, 64, 65, 1000]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_agrees_with_the_reference(
    name: str,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    has_sinks: bool,
    seed: int,
) -> None:
    compare(
        name,
        [(queries, queries + before) for queries, before in rows],
        window,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        softcap=softcap,
        has_sinks=has_sinks,
        seed=seed,
    )


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 513])
def test_lengths_around_tile_borders(name: str, length: int) -> None:
    compare(name, [(1, length), (length, length), (min(3, length), length)], **SIZES)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("window", [1, 4, 5, 63, 64, 65])
def test_windows_that_start_inside_a_block(name: str, window: int) -> None:
    rows = [(1, 70), (1, 3), (5, 130), (64, 64), (1, window), (1, window + 1)]
    compare(name, rows, window, **SIZES)


@pytest.mark.parametrize("name", FAST)
def test_head_of_256(name: str) -> None:
    sizes = {**SIZES, "head_dim": 256, "heads": 4, "kv_heads": 1}
    compare(name, [(9, 80), (1, 200)], 32, **sizes)
    compare(name, [(9, 80), (1, 200)], 32, **{**sizes, "dtype": torch.bfloat16})


def test_a_sink_takes_the_share_of_a_further_key_without_a_value() -> None:
    """Against softmax over the scores and one more column, as gpt-oss was published."""
    case = make_attention_case([(5, 9)], **SIZES)
    queries, kv, batch = case
    sinks = torch.linspace(-2, 4, 6)
    keys, values = (part[batch.block_tables[0].long()].transpose(1, 2).flatten(0, 1)[:9] for part in kv)
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(3, 1)) * 0.3
    scores = scores.masked_fill(torch.arange(9) > torch.arange(4, 9)[:, None], float("-inf"))
    weights = torch.cat([scores, sinks[:, None, None].expand(6, 5, 1)], 2).softmax(2)[:, :, :9]
    expected = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(3, 1)).flatten(1)
    for version in (ReferenceAttention, *FAST.values()):
        found = attend(version(6, 2, 16, 0.3), case, sinks=sinks)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", FAST)
def test_long_context(name: str) -> None:
    compare(name, [(1, 4000), (33, 2050)], **{**SIZES, "block_size": 16})


@pytest.mark.parametrize("name", FAST)
def test_rows_without_queries_are_skipped(name: str) -> None:
    compare(name, [(2, 9), (0, 5), (1, 4)], **SIZES)


@pytest.mark.parametrize("name", FAST)
def test_large_scores_do_not_overflow(name: str) -> None:
    compare(name, [(7, 90), (1, 90)], **{**SIZES, "scale": 40.0})


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_result_depends_only_on_the_query(dtype: torch.dtype, softcap: float | None, window: int | None) -> None:
    """Bit-identical in one chunk, token by token, in a batch, and with another block size."""
    sizes: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 40, "dtype": dtype}
    attention = NativeAttention(6, 2, 40, 0.2, softcap)
    length = 150
    queries, kv, batch = make_attention_case([(length, length)], block_size=16, **sizes)
    whole = attention(queries, kv, attention.prepare(batch, 16, window))
    table = batch.block_tables[0].tolist()
    for first, count in ((0, 1), (63, 2), (64, 1), (100, 37), (149, 1), (5, 145)):
        part = queries[first : first + count]
        rows = make_rows([([0] * count, first, table)], 16)
        assert torch.equal(attention(part, kv, attention.prepare(rows, 16, window)), whole[first : first + count])
    others = [([0] * 9, 20, table), ([0], 149, table), ([0] * 30, 60, table)]
    mixed = make_rows(others, 16)
    together = torch.cat((queries[20:29], queries[149:], queries[60:90]))
    expected = torch.cat((whole[20:29], whole[149:], whole[60:90]))
    assert torch.equal(attention(together, kv, attention.prepare(mixed, 16, window)), expected)
    flat = kv[:, table].transpose(2, 3).flatten(1, 2)[:, :length]
    other = torch.full((2, 60, 2, 3, 40), float("nan"), dtype=dtype)
    other[:, 1:51] = flat.view(2, 50, 3, 2, 40).transpose(2, 3)
    rows = make_rows([([0] * length, 0, list(range(1, 51)))], 3)
    assert torch.equal(attention(queries, other, attention.prepare(rows, 3, window)), whole)


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "softcap", "scale"),
    [
        (64, 3, None, None, 0.125),
        (64, 3, None, None, 4.0),  # the running maximum keeps growing
        (64, 1, 100, None, 0.5),
        (128, 4, None, 20.0, 0.3),
        (128, 2, 33, None, 2.0),
        (80, 5, None, None, 0.2),
        (256, 2, None, None, 0.3),
    ],
)
def test_native_prompt_does_not_depend_on_chunking(
    head_dim: int, group: int, window: int | None, softcap: float | None, scale: float
) -> None:
    """Bit-identical for every chunk size, from one token (one unit for several heads) to several units."""
    sizes: dict[str, Any] = {"heads": 3 * group, "kv_heads": 3, "head_dim": head_dim, "dtype": torch.bfloat16}
    attention = NativeAttention(3 * group, 3, head_dim, scale, softcap)
    queries, kv, batch = make_attention_case([(330, 330)], block_size=16, **sizes)
    whole = attention(queries, kv, attention.prepare(batch, 16, window))
    table = batch.block_tables[0].tolist()
    cuts = [0, 1, 2, 5, 6, 37, 63, 64, 65, 100, 128, 131, 290, 329, 330]
    for first, end in [*zip(cuts, cuts[1:], strict=False), (17, 330), (96, 290)]:
        rows = make_rows([([0] * (end - first), first, table)], 16)
        part = attention(queries[first:end], kv, attention.prepare(rows, 16, window))
        assert torch.equal(part, whole[first:end]), (first, end)


@pytest.mark.parametrize("scale", [0.02, 0.125, 0.6])
def test_native_weights_are_as_good_as_bfloat16(scale: float) -> None:
    """Apart from rounding weights and results to bfloat16, native attention adds hardly any error."""
    queries, kv, batch = make_attention_case(
        [(200, 200)], heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16
    )
    native, reference = NativeAttention(6, 2, 64, scale), ReferenceAttention(6, 2, 64, scale)
    exact = attend(reference, (queries.float(), kv.float(), batch))
    error = (attend(native, (queries, kv, batch)).float() - exact).double()
    rounding = (exact.bfloat16().float() - exact).double()
    assert error.pow(2).mean().sqrt() < 1.6 * rounding.pow(2).mean().sqrt()
    assert abs(error.mean()) < 0.05 * rounding.pow(2).mean().sqrt()


def test_batched_copies_no_more_of_the_cache_than_it_reads() -> None:
    """Two small rows in a cache of 4096 blocks: temporary allocations stay small."""
    attention = BatchedAttention(4, 2, 64, 0.1)
    kv = torch.zeros(2, 4096, 2, 16, 64)
    batch = make_rows([([0], 20, [5, 9]), ([0], 30, [4000, 7])], 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        attention(torch.randn(2, 4, 64), kv, attention.prepare(batch, 16, None))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 1 << 20
