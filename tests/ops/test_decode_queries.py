"""Decode attention of rows with several queries each, a token and its drafts, and of rows in parts of equal size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.paged import make_attention_case, make_tiled, rewritten
from helpers.triton_mode import device, interpreted

from millrace.ops.attention import PagedAttention, ReferenceAttention
from millrace.ops.attention.decode_rule import LIST_COLUMNS, SPLIT_CELLS, decode_tuning, few_rows
from millrace.ops.kv.cache import SCALE_BYTES, SCALE_WORDS, CacheFormat
from millrace.ops.kv.packed import packed_items
from millrace.ops.triton.attention.decode import DecodeTuning, SplitWorkspace, decode
from millrace.ops.triton.attention.paged_kv import AttentionShape, PagedRows
from millrace.ops.triton.attention.row_parts import UNIT, list_rows
from millrace.run.packet import decode_rows
from millrace.run.packet.decode_rows import num_words, write_decode_rows

DTYPE = torch.float32 if interpreted else torch.bfloat16
"""Dtype of queries: Triton's interpreter cannot multiply bfloat16. Keys and values are bfloat16 numbers anyway."""
CLOSE = 2e-2
FORMATS: tuple[CacheFormat, ...] = ("plain", "packed", "fp8")
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
SWAPPED = DecodeTuning(tile=64, splits=3, warps=4, stages=3, swap=True)
NARROW = DecodeTuning(tile=32, splits=3, warps=2, stages=3)
LENGTHS = [70, 9, 200, 33]


def in_format(kv: torch.Tensor, held: str) -> torch.Tensor:
    if held == "plain":
        return kv.to(DTYPE)
    items, dtype, unwritten = {
        "packed": (packed_items(kv.shape[4]) + SCALE_WORDS, torch.int16, 0x7FC1),
        "fp8": (kv.shape[4] + SCALE_BYTES, torch.uint8, 0xFF),
    }[held]
    return rewritten(kv, torch.full((*kv.shape[:4], items), unwritten, dtype=dtype, device=kv.device))


class Case:
    """Rows of `queries` queries each, and the reference's result."""

    def __init__(
        self,
        lengths: list[int],
        queries: int,
        *,
        window: int | None = None,
        softcap: float | None = None,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        head_dim: int = DIM,
        has_sinks: bool = False,
    ) -> None:
        self.sinks = torch.linspace(-1, 5, heads, device=device) if has_sinks else None
        self.lengths, self.num_queries, self.window = lengths, queries, window or 0
        rows = [(queries, length) for length in lengths]
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": BLOCK}
        given, kv, self.given = make_attention_case(rows, device=device, dtype=torch.bfloat16, **sizes)
        self.queries, self.kv = given.to(DTYPE), kv
        self.arguments = (heads, kv_heads, head_dim, 0.2, softcap)
        self.shape = AttentionShape(*self.arguments)
        self.table_rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
        self.rows = PagedRows(self.given.query_starts, self.given.seq_lens, self.table_rows, self.given.block_tables)

    def expected(self, kv: torch.Tensor) -> torch.Tensor:
        """The reference's result over a cache of any format."""
        reference = ReferenceAttention(*self.arguments)
        return reference(self.queries, kv, reference.prepare(self.given, BLOCK, self.window or None), self.sinks)

    def check(self, tuning: DecodeTuning, held: str = "plain", **options: Any) -> None:
        workspace, kv = SplitWorkspace(512, self.shape, torch.device(device)), in_format(self.kv, held)
        expected = self.expected(kv)
        options = {"all_single": True, "queries_per_row": self.num_queries, "rows": self.rows, **options}
        for _ in range(2):  # the second launch needs counters at zero
            out = torch.full_like(expected, float("nan"))
            decode(self.queries, kv, out, shape=self.shape, workspace=workspace, tuning=tuning, window=self.window,
                   sinks=self.sinks, **options)  # fmt: skip
            torch.testing.assert_close(out.float(), expected.float(), atol=CLOSE, rtol=CLOSE)

    def host_list(self, lengths: list[int]) -> torch.Tensor:
        count = len(lengths)
        words, rows = np.zeros(num_words(count), np.int32), np.arange(count)
        write_decode_rows(words, rows * self.num_queries, rows, np.array(lengths, np.int32))
        return torch.from_numpy(words.reshape(LIST_COLUMNS, -1)).to(device)


@pytest.mark.parametrize("queries", [2, 4, 8])
@pytest.mark.parametrize("tuning", [SWAPPED, NARROW, replace(NARROW, splits=1)])
def test_a_row_with_drafts(tuning: DecodeTuning, queries: int) -> None:
    """The last split of a row of 33 tokens has a key that its first queries do not see."""
    Case(LENGTHS, queries).check(tuning)


@pytest.mark.parametrize("held", ["packed", "fp8"])
def test_formats_of_the_cache(held: str) -> None:
    Case([70, 9, 65], 4).check(NARROW, held)


@pytest.mark.parametrize("heads", [8, 6, 12, 17])
@pytest.mark.parametrize("tuning", [SWAPPED, NARROW])
def test_more_queries_than_fit_a_tile(tuning: DecodeTuning, heads: int) -> None:
    """Several programs, the last of which may have fewer queries, share the queries of a row and KV head."""
    Case([70, 9], 5, heads=heads, kv_heads=1).check(tuning)


@pytest.mark.parametrize("tuning", [SWAPPED, NARROW])
@pytest.mark.parametrize("window", [2, 40])
def test_windows(tuning: DecodeTuning, window: int) -> None:
    Case(LENGTHS, 4, window=window).check(tuning)


@pytest.mark.parametrize("tuning", [SWAPPED, NARROW])
@pytest.mark.parametrize("window", [None, 40])
def test_sinks(tuning: DecodeTuning, window: int | None) -> None:
    Case(LENGTHS, 4, window=window, has_sinks=True).check(tuning)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (5, 1), (1, 1)])
def test_group_sizes_and_a_softcap(heads: int, kv_heads: int) -> None:
    Case([70, 9], 4, heads=heads, kv_heads=kv_heads, softcap=5.0).check(NARROW)


@pytest.mark.parametrize("held", ["plain", "packed"])
@pytest.mark.parametrize("queries", [1, 4])
def test_listed_rows(queries: int, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list splits the longest row, and its lengths are those that hold."""
    monkeypatch.setattr(decode_rows, "LONG_TOKENS", 128)
    lengths = [40, 9, 400, 33]
    case = Case(lengths, queries)
    unknown = replace(case.rows, seq_lens=torch.full_like(case.given.seq_lens, 1 << 20))
    listed = case.host_list(lengths)
    assert int(listed[4].max()) > 1
    case.check(replace(NARROW, splits=8), held, listed=listed, rows=unknown)


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_shorter_than_their_queries_and_empty_rows(splits: int) -> None:
    case = Case([70, 4, 4], 4)
    lengths = torch.tensor([70, 1, 0], dtype=torch.int32, device=device)
    rows, kv = replace(case.rows, seq_lens=lengths), case.kv.to(DTYPE)
    expected = case.expected(kv)
    workspace, out = SplitWorkspace(64, case.shape, torch.device(device)), torch.full_like(expected, 7.0)
    tuning = replace(NARROW, splits=splits)
    decode(case.queries, kv, out, rows, case.shape, workspace, tuning, all_single=True, queries_per_row=4)
    torch.testing.assert_close(out[:4].float(), expected[:4].float(), atol=CLOSE, rtol=CLOSE)
    assert (out[4:7] == 0).all()
    assert (out[8:] == 7.0).all()


def test_a_workspace_too_small_for_all_queries_is_refused() -> None:
    case = Case([20], 8, heads=4, kv_heads=1)
    workspace, kv = SplitWorkspace(5, case.shape, torch.device(device)), case.kv.to(DTYPE)
    with pytest.raises(ValueError, match="workspace"):
        decode(case.queries, kv, case.queries, case.rows, case.shape, workspace, NARROW, queries_per_row=8)


def paged_rows(lengths: list[int], counts: list[int]) -> PagedRows:
    def tensor(numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    starts = [0, *np.cumsum(counts).tolist()]
    table_rows = [len(lengths) - 1 - row for row in range(len(lengths))]
    return PagedRows(tensor(starts), tensor(lengths), tensor(table_rows), tensor([[0]]))


def parts_of(length: int, window: int, size: int, queries: int) -> int:
    first = max(length - (queries - 1) - window, 0) if window else 0
    return -(-(-(-length // UNIT) - first // UNIT) // size)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize(
    "lengths", [[8000] * 16, [1], [32000], [30, 5000, 64, 65, 1, 900], [100 + 97 * row for row in range(24)]]
)
def test_parts_are_as_small_as_the_list_allows(lengths: list[int], queries: int, window: int) -> None:
    """Every decode row is in the list once per part; rows with another number of queries are not."""
    entries, other = 33, len(lengths) > 2
    counts = [queries] * len(lengths)
    if other:
        counts[1] = 3
    rows = paged_rows(lengths, counts)
    found = list_rows(rows, entries, window, queries_per_row=queries).cpu().numpy()
    own = [row for row in range(len(lengths)) if counts[row] == queries]

    def total(size: int) -> int:
        return sum(parts_of(lengths[row], window, size, queries) for row in own)

    size = next(size for size in range(1, 1 << 20) if total(size) <= entries)
    starts, expected, cell = rows.query_starts.tolist(), [], 0
    for row in own:
        parts = parts_of(lengths[row], window, size, queries)
        expected += [(starts[row], len(lengths) - 1 - row, lengths[row], part, parts, cell) for part in range(parts)]
        cell += parts
    assert [tuple(entry) for entry in found.T.tolist()[: len(expected)]] == expected
    assert not found[2, len(expected) :].any()


def test_more_rows_than_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        list_rows(paged_rows([5, 5], [1, 1]), 1)


@pytest.mark.parametrize("held", ["plain", "packed"])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_of_few_rows(queries: int, held: CacheFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the op: rows are split, and padding changes nothing."""
    if interpreted:
        want_few_programs(monkeypatch)
    case = Case([70, 9, 300 if interpreted else 9000], queries)
    attention, kv = PagedAttention(*case.arguments), in_format(case.kv, held)
    step = make_tiled(case.given, queries_per_row=queries)
    prepared = attention.prepare(step, BLOCK, None, held)
    assert prepared.in_parts
    found = [attention(case.queries, kv, prepared).float() for _ in range(2)]
    torch.testing.assert_close(found[0], case.expected(kv).float(), atol=CLOSE, rtol=CLOSE)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("queries", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [(32, 8), (32, 4), (4, 1), (64, 2)])
def test_parts_of_few_rows_fit_the_workspace(heads: tuple[int, int], queries: int, held: CacheFormat) -> None:
    cpu, shape = torch.device("cpu"), AttentionShape(*heads, 128, 0.1)
    found = [few_rows(shape, rows, cpu, held, queries) for rows in range(1, 300)]
    assert found[0] is not None
    for rows, few in enumerate(found, start=1):
        if few is not None:
            assert rows <= few.entries
            turns = -(-queries // shape.queries_per_program(queries, few.own_queries))
            assert few.entries * shape.num_kv_heads * turns <= SPLIT_CELLS
            tuning = decode_tuning(shape, rows, torch.bfloat16, cpu, held, True, queries)
            assert (tuning.tile, tuning.stages) == (few.tile[0], few.tile[2])


@pytest.mark.gpu
@pytest.mark.parametrize("held", FORMATS)
@pytest.mark.parametrize("queries", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_real_sizes(count: int, queries: int, held: CacheFormat) -> None:
    lengths = [queries + (911 * row) % 2500 for row in range(count - 1)] + [9000]
    case = Case(lengths, queries, heads=32, kv_heads=8, head_dim=128)
    attention, kv = PagedAttention(*case.arguments), in_format(case.kv, held)
    step = make_tiled(case.given, queries_per_row=queries, decode_rows=case.host_list(lengths))
    prepared = attention.prepare(step, BLOCK, None, held)
    torch.cuda.synchronize()  # another kernel would run here
    found = attention(case.queries, kv, prepared)
    torch.testing.assert_close(found.float(), case.expected(kv).float(), atol=CLOSE, rtol=CLOSE)
