"""Rows that share leading blocks read them together; results are bit-identical to those of each row alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from helpers.paged import make_rows
from helpers.suite import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace.ops.attention import NativeAttention, ReferenceAttention
from millrace.ops.cpp import native

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

Path = Sequence[tuple[int, int]]
"""(name, tokens) of each piece of a row's text. Rows that start with the same pieces share the blocks they fill."""


class SharingCase:
    """Rows over one cache. Slots that no row has written are NaN."""

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        sizes: tuple[int, int, int],
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`counts`: new tokens per row; `sizes`: heads, KV heads and head_dim."""
        torch.manual_seed(len(paths))
        heads, kv_heads, head_dim = sizes
        places = [self._places(number, path, block_size) for number, path in enumerate(paths)]
        names = sorted({name for row in places for name in row})
        order = list(range(1, len(names) + 1))
        random.Random(len(names)).shuffle(order)
        block_of = dict(zip(names, order, strict=True))
        self.tables = [[block_of[name] for name in row] for row in places]
        self.lengths = [sum(tokens for _, tokens in path) for path in paths]
        self.counts = [min(count, length) for count, length in zip(counts, self.lengths, strict=True)]
        self.kv = torch.full((2, len(names) + 1, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        for table, length in zip(self.tables, self.lengths, strict=True):
            for position in range(length):
                self.kv[:, table[position // block_size], :, position % block_size] = torch.randn(2, kv_heads, head_dim)
        self.queries = torch.randn(sum(self.counts), heads + 2 * kv_heads, head_dim).to(dtype)[:, :heads]
        self.block_size = block_size

    @staticmethod
    def _places(number: int, path: Path, block_size: int) -> list[tuple[object, ...]]:
        """A name for each block: its pieces so far if they fill it, otherwise one of the row's own."""
        pieces: list[tuple[int, int]] = []
        for name, tokens in path:
            pieces += [(name, i) for i in range(tokens)]
        names: list[tuple[object, ...]] = []
        for end in range(block_size, len(pieces) + block_size, block_size):
            full = end < len(pieces)  # the last block is written only by its row
            names.append((0, *[name for name, _ in pieces[:end]], end) if full else (1, number, end))
        return names

    def attend(
        self, attention: NativeAttention | ReferenceAttention, window: int | None, rows: Sequence[int]
    ) -> list[Tensor]:
        batch = make_rows(
            [([0] * self.counts[row], self.lengths[row] - self.counts[row], self.tables[row]) for row in rows],
            self.block_size,
        )
        parts = torch.split(self.queries, self.counts)
        queries = torch.cat([parts[row] for row in rows])
        prepared = attention.prepare(batch, self.block_size, window)
        out: Tensor = attention(queries, self.kv, prepared)  # type: ignore[arg-type]
        return list(torch.split(out, [self.counts[row] for row in rows]))


def check(case: SharingCase, sizes: tuple[int, int, int], window: int | None, softcap: float | None) -> None:
    native_one, reference = NativeAttention(*sizes, 0.2, softcap), ReferenceAttention(*sizes, 0.2, softcap)
    all_rows = range(len(case.lengths))
    together = case.attend(native_one, window, all_rows)
    expected = case.attend(reference, window, all_rows)
    tolerance = TOLERANCE[case.kv.dtype]
    for row in all_rows:
        assert torch.equal(together[row], case.attend(native_one, window, [row])[0]), row
        torch.testing.assert_close(together[row].float(), expected[row].float(), atol=tolerance, rtol=tolerance)


ROOT, BRANCH, OWN = 0, 1, 100


@settings(max_examples=examples(20))
@example(
    rows=[(0, 5, 1)] * 9,
    root=512,
    branch=0,
    group=3,
    head_dim=64,
    block_size=16,
    window=None,
    softcap=None,
    dtype=torch.bfloat16,
)
@example(
    rows=[(0, 90, 1)] * 6 + [(1, 3, 1)] * 6,
    root=192,
    branch=320,
    group=3,
    head_dim=64,
    block_size=16,
    window=None,
    softcap=None,
    dtype=torch.bfloat16,
)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 140), st.sampled_from([1, 1, 1, 2, 30])), min_size=2, max_size=12
    ),
    root=st.sampled_from([0, 63, 64, 200, 384]),
    branch=st.sampled_from([0, 70, 256]),
    group=st.sampled_from([1, 3, 8, 17]),
    head_dim=st.sampled_from([16, 20, 64]),
    block_size=st.sampled_from([3, 16, 32, 100]),
    window=st.sampled_from([None, 50, 300, 2000]),
    softcap=st.sampled_from([None, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_that_share_blocks_get_the_results_of_each_alone(
    rows: list[tuple[int, int, int]],
    root: int,
    branch: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    """Rows are (branch, own tokens, new tokens)."""
    paths = [
        [(ROOT, root), (BRANCH + which, branch * which), (OWN + number, own)]
        for number, (which, own, _) in enumerate(rows)
    ]
    sizes = (2 * group, 2, head_dim)
    case = SharingCase(paths, [count for _, _, count in rows], sizes, block_size, dtype)
    check(case, sizes, window, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_share_a_long_prefix(dtype: torch.dtype) -> None:
    sizes = (9, 3, 64)
    paths = [[(ROOT, 640), (BRANCH + number // 20, 128), (OWN + number, 1 + 7 * number)] for number in range(50)]
    check(SharingCase(paths, [1] * 50, sizes, 16, dtype), sizes, None, None)


def tiles_saved(paths: Sequence[Path], counts: Sequence[int], block_size: int = 16) -> int:
    case = SharingCase(paths, counts, (1, 1, 1), block_size, torch.float32)
    batch = make_rows(
        [
            ([0] * count, length - count, table)
            for count, length, table in zip(case.counts, case.lengths, case.tables, strict=True)
        ],
        block_size,
    )
    columns = (batch.query_starts, batch.seq_lens, batch.block_tables)
    found: int = native.native().with_gil.tiles_saved(
        *(column.data_ptr() for column in columns), len(paths), batch.block_tables.shape[1], block_size
    )
    return found


def test_only_whole_tiles_in_the_same_blocks_are_shared() -> None:
    eight = [[(ROOT, 1024), (OWN + number, 32)] for number in range(8)]
    assert tiles_saved(eight, [1] * 8) == 7 * 16
    assert tiles_saved(eight, [1] * 7 + [2]) == 6 * 16  # a row with several new tokens does not share
    assert tiles_saved([[(OWN + number, 1056)] for number in range(8)], [1] * 8) == 0
    assert tiles_saved([[(ROOT, 1030), (OWN + number, 100)] for number in range(8)], [1] * 8) == 7 * 16
    assert tiles_saved([[(ROOT, 1020), (OWN + number, 100)] for number in range(8)], [1] * 8) == 7 * 15
    assert tiles_saved([[(ROOT, 1024), (OWN + number, 1)] for number in range(8)], [1] * 8) == 7 * 16
    assert tiles_saved([[(ROOT, 63), (OWN + number, 900)] for number in range(8)], [1] * 8) == 0


def test_groups_of_rows_share_more_after_a_common_prefix() -> None:
    tree = [[(ROOT, 256), (BRANCH + number % 2, 512), (OWN + number, 20)] for number in range(8)]
    assert tiles_saved(tree, [1] * 8) == 7 * 4 + 6 * 8
    stray = [[(ROOT, 64), (OWN, 1000)]] + [[(ROOT, 64), (BRANCH, 960), (OWN + number, 9)] for number in range(1, 8)]
    assert tiles_saved(stray, [1] * 8) == 7 * 1 + 6 * 15


def test_too_few_shared_tiles_are_not_worth_a_barrier() -> None:
    assert tiles_saved([[(ROOT, 64), (OWN + number, 100)] for number in range(3)], [1] * 3) == 0
