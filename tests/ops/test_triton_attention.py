"""Paged attention in Triton against the reference: page and tile borders, group sizes, windows, caps, head sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paged import make_attention_case, make_rows, make_tiled
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import PagedAttention, ReferenceAttention, TiledRows
from millrace.ops.attention.decode_rule import LIST_COLUMNS, SPLIT_CELLS, decode_tuning, takes_list
from millrace.ops.attention.long_rows import LongRow
from millrace.ops.kv.cache import CacheFormat
from millrace.ops.triton.attention.prefill import AttentionShape, DecodeTuning, PagedRows, SplitWorkspace, decode
from millrace.run.packet.decode_rows import num_words, write_decode_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
HALF = torch.float16 if interpreted else torch.bfloat16
"""Triton's interpreter cannot multiply bfloat16."""
SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": HALF}


def attend(version: Any, case: Any, window: int | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    queries, kv, batch = case
    result: torch.Tensor = version(queries, kv, version.prepare(batch, kv.shape[3], window), sinks)
    return result


def compare(rows: list[tuple[int, int]], window: int | None = None, tiled: bool = False, **changes: Any) -> None:
    sizes = {**SIZES, **changes}
    softcap, scale = sizes.pop("softcap", None), sizes.pop("scale", 0.3)
    sinks = torch.linspace(-3, 6, sizes["heads"], device=device) if sizes.pop("has_sinks", False) else None
    case = make_attention_case(rows, device=device, **sizes)
    arguments = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"], scale, softcap)
    expected = attend(ReferenceAttention(*arguments), case, window, sinks)
    found = attend(PagedAttention(*arguments, tile_decode_rows=tiled), case, window, sinks)
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[sizes["dtype"]]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


MIXED = [(1, 1), (1, 17), (1, 64), (1, 65), (1, 300), (2, 2), (5, 70), (33, 33), (70, 129), (1, 16)]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_mixed_rows(dtype: torch.dtype, tiled: bool) -> None:
    compare(MIXED, tiled=tiled, dtype=dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    compare([(1, 70), (3, 40), (1, 200)], head_dim=head_dim)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 17])
def test_query_heads_per_kv_head(group: int) -> None:
    compare([(1, 70), (45, 50)], heads=group, kv_heads=1)


@pytest.mark.parametrize("window", [1, 4, 63, 64, 65, 300])
def test_windows(window: int) -> None:
    compare([(1, 70), (1, 3), (5, 130), (64, 64), (1, window + 1)], window)


@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_softcap(softcap: float) -> None:
    compare([(1, 70), (9, 130)], softcap=softcap, scale=2.0)


@pytest.mark.parametrize(("tiled", "window"), [(False, None), (False, 20), (True, 20)])
def test_sinks(tiled: bool, window: int | None) -> None:
    """Rows of one split, of several, and tiles."""
    compare([(1, 1), (1, 70), (9, 130), (1, 1500)], window, tiled, has_sinks=True)


@pytest.mark.parametrize("block_size", [1, 3, 32, 100])
def test_block_sizes(block_size: int) -> None:
    compare([(1, 70), (9, 130)], block_size=block_size)


def test_large_scores_do_not_overflow() -> None:
    compare([(7, 90), (1, 90)], scale=40.0)


def test_rows_without_queries_are_skipped() -> None:
    compare([(2, 9), (0, 5), (1, 4)])


def test_many_rows_are_not_split_and_few_are() -> None:
    if not interpreted:
        compare([(1, 2 + row) for row in range(66)], kv_heads=8, heads=8)
    compare([(1, 1500)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_rows_of_real_sizes(dtype: torch.dtype) -> None:
    real = {"heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 0.09, "dtype": dtype}
    compare([(1, 32768), (1, 8191), (129, 4100), (1, 1)], **real)


@pytest.mark.parametrize("window", [None, 20])
def test_tiled_result_depends_only_on_the_query(window: int | None) -> None:
    """Bit-identical in one chunk, token by token, and in a batch."""
    attention = PagedAttention(4, 2, 16, 0.2, tile_decode_rows=True)
    length = 100 if interpreted else 700
    queries, kv, batch = make_attention_case([(length, length)], device=device, **SIZES)
    whole = attention(queries, kv, attention.prepare(batch, 16, window))
    table = batch.block_tables[0].tolist()
    for first, count in ((0, 1), (63, 2), (64, 1), (70, 30), (99, 1)):
        rows = make_rows([([0] * count, first, table)], 16, device)
        part = attention(queries[first : first + count], kv, attention.prepare(rows, 16, window))
        assert torch.equal(part, whole[first : first + count])
    mixed = make_rows([([0] * 9, 20, table), ([0], 99, table), ([0] * 30, 60, table)], 16, device)
    together = torch.cat((queries[20:29], queries[99:100], queries[60:90]))
    expected = torch.cat((whole[20:29], whole[99:100], whole[60:90]))
    assert torch.equal(attention(together, kv, attention.prepare(mixed, 16, window)), expected)


def test_arrival_counters_are_left_at_zero() -> None:
    """A second launch over the same workspace gives the same result."""
    attention = PagedAttention(4, 2, 16, 0.2)
    queries, kv, batch = make_attention_case([(1, 700), (1, 90)], device=device, **SIZES)
    prepared = attention.prepare(batch, 16, None)
    assert torch.equal(attention(queries, kv, prepared), attention(queries, kv, prepared))


@pytest.mark.parametrize("shared", [128, 256, 640])
@pytest.mark.parametrize("group", [1, 4])
def test_shared_prefix(shared: int, group: int) -> None:
    """Rows that start with the same blocks get the results of each alone, also with a padding row."""
    lengths = [shared + 1, shared + 40, shared + 200]
    sizes = {**SIZES, "heads": 2 * group}
    queries, kv, batch = make_attention_case([(1, length) for length in lengths], device=device, **sizes)
    kv = torch.where(kv.isnan(), 0.25, kv)
    tables = torch.zeros((5, 64), dtype=torch.int32, device=device)
    tables[:3, : batch.block_tables.shape[1]] = batch.block_tables
    tables[:3, : shared // 16] = tables[0, : shared // 16].clone()
    batch = replace(batch, block_tables=tables[:3])
    arguments, sinks = (2 * group, 2, 16, 0.3), torch.linspace(-1, 5, 2 * group, device=device)
    expected = attend(ReferenceAttention(*arguments), (queries, kv, batch), sinks=sinks)
    tiled = TiledRows(
        torch.arange(5, dtype=torch.int32, device=device),
        torch.tensor([*lengths, 1], dtype=torch.int32, device=device),
        tables,
        table_rows=torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=device),
        shared_len=torch.tensor([shared], dtype=torch.int32, device=device),
    )
    found = attend(PagedAttention(*arguments), (torch.cat((queries, queries[:1])), kv, tiled), sinks=sinks)
    tolerance = TOLERANCE[HALF]
    torch.testing.assert_close(found[:3].float(), expected.float(), atol=tolerance, rtol=tolerance)
    assert found[3].isfinite().all()


SWAPPED = DecodeTuning(tile=64, splits=8, warps=4, stages=3, swap=True)
PLAIN = DecodeTuning(tile=32, splits=8, warps=1, stages=4)


def list_of(batch: Any, rows: list[tuple[int, int]]) -> torch.Tensor:
    """The list of decode rows as in a step's packet, with room for one more row."""
    decode_rows = [
        (batch.query_starts_host[row], row, length) for row, (count, length) in enumerate(rows) if count == 1
    ]
    words = np.zeros(num_words(len(rows) + 1), np.int32)
    write_decode_rows(words, *np.array(decode_rows, np.int32).reshape(-1, 3).T)
    return torch.from_numpy(words.reshape(LIST_COLUMNS, -1)).to(device)


def compare_decode_rows(
    rows: list[tuple[int, int]], tuning: DecodeTuning, window: int = 0, lists: bool = True, **changes: Any
) -> None:
    """Decode attention of the rows with a single query, listed or not; results of other rows are not written."""
    sizes = {**SIZES, **changes}
    softcap = sizes.pop("softcap", None)
    queries, kv, batch = make_attention_case(rows, device=device, **sizes)
    arguments = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"], 0.3, softcap)
    expected = attend(ReferenceAttention(*arguments), (queries, kv, batch), window or None)
    shape, table_rows = AttentionShape(*arguments), torch.arange(len(rows), dtype=torch.int32, device=device)
    paged = PagedRows(batch.query_starts, batch.seq_lens, table_rows, batch.block_tables)
    workspace = SplitWorkspace(256, shape, torch.device(device))
    single = [start for start, (count, _) in zip(batch.query_starts_host, rows, strict=False) if count == 1]
    others = [token for token in range(len(queries)) if token not in single]
    entries = list_of(batch, rows) if lists else None
    for _ in range(2):  # the second launch needs counters at zero
        out = torch.full_like(expected, float("nan"))
        decode(queries, kv, out, paged, shape, workspace, tuning, window, listed=entries)
        tolerance = TOLERANCE[sizes["dtype"]]
        torch.testing.assert_close(out[single].float(), expected[single].float(), atol=tolerance, rtol=tolerance)
        assert out[others].isnan().all()


UNEVEN = [(1, 9), (1, 500), (3, 40), (1, 64), (1, 1), (64, 100), (1, 129)]


@pytest.mark.parametrize("tuning", [SWAPPED, PLAIN])
@pytest.mark.parametrize("window", [0, 30, 220])
def test_listed_rows_are_split_and_combined(tuning: DecodeTuning, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.run.packet.decode_rows.LONG_TOKENS", 128)  # The second row is longer by far.
    compare_decode_rows(UNEVEN, tuning, window, head_dim=32)


def test_a_list_without_rows() -> None:
    compare_decode_rows([(3, 40), (2, 2)], SWAPPED)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_swapped_tiles_with_all_head_and_group_sizes(head_dim: int, group: int) -> None:
    compare_decode_rows([(1, 70), (1, 3)], SWAPPED, head_dim=head_dim, heads=group, kv_heads=1)


@pytest.mark.parametrize("splits", [1, 3])
def test_swapped_tiles_with_equal_splits_and_a_cap(splits: int) -> None:
    tuning = replace(SWAPPED, splits=splits)
    compare_decode_rows([(1, 90), (1, 1), (1, 200)], tuning, lists=False, softcap=5.0, head_dim=64)


def test_which_sizes_use_swapped_tiles_and_lists() -> None:
    """Swapped: 16-bit caches with up to four streams per multiprocessor, unless so few that all are split."""
    cpu, half = torch.device("cpu"), torch.bfloat16
    shape = AttentionShape(16, 8, 128, 0.1)
    swapped = [rows for rows in range(1, 80) if decode_tuning(shape, rows, half, cpu, "plain", True).swap]
    assert swapped == list(range(13, 67))
    assert not decode_tuning(shape, 32, half, cpu, "fp8", True).swap
    assert not decode_tuning(shape, 32, torch.float32, cpu, "plain", True).swap
    assert not takes_list(64, "plain", cpu)
    assert takes_list(256, "plain", cpu)
    assert not takes_list(256, "fp8", cpu)


@pytest.mark.parametrize("held", ["plain", "packed", "fp8"])
def test_splits_of_rows_without_a_list_fit_the_workspace(held: CacheFormat) -> None:
    cpu, shape = torch.device("cpu"), AttentionShape(8, 4, 128, 0.1)
    for rows in range(1, 600):
        if not takes_list(streams := rows * shape.num_kv_heads, held, cpu):
            tuning = decode_tuning(shape, rows, torch.bfloat16, cpu, held, listed=False)
            assert tuning.splits == 1 or streams * tuning.splits <= SPLIT_CELLS, rows


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "kv_heads"), [(14, 8), (32, 8), (32, 4), (64, 8), (200, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_listed_rows_of_real_sizes(rows: int, kv_heads: int, dtype: torch.dtype) -> None:
    lengths = [(1, 1 + (137 * row) % 1501) for row in range(rows - 1)] + [(1, 9000)]
    real = {"heads": 32, "kv_heads": kv_heads, "head_dim": 128, "dtype": dtype}
    tuning = decode_tuning(AttentionShape(32, kv_heads, 128, 0.3), rows, dtype, torch.device("cuda"), "plain", True)
    compare_decode_rows(lengths, tuning, **real)


@pytest.mark.parametrize("kind", ["shared", "split", "long"])
def test_layers_with_a_window_take_steps_made_for_those_without(kind: str) -> None:
    """A shared prefix is not theirs, keys of a tile are not split, and long rows are tiled."""
    rows = (
        [(150, 170), (1, 60)] if kind == "long" else [(1, 200), (1, 140)] if kind == "shared" else [(9, 150), (1, 40)]
    )
    queries, kv, batch = make_attention_case(rows, device=device, **SIZES)
    arguments = (4, 2, 16, 0.3)
    expected, paged = attend(ReferenceAttention(*arguments), (queries, kv, batch), 20), PagedAttention(*arguments)
    all_tiles = torch.tensor([[1, 0], [0, 0], [-1, -1]], dtype=torch.int32, device=device)
    tiled = {
        "shared": make_tiled(batch, shared_len=torch.tensor([128], dtype=torch.int32, device=device)),
        "split": make_tiled(batch, tiles=all_tiles, has_decode_rows=False, context_parts=4),
        "long": make_tiled(batch, long_rows=(LongRow(0, 0, 150, 20),)),
    }[kind]
    found = attend(paged, (queries, kv, tiled), 20)
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[HALF], rtol=TOLERANCE[HALF])
