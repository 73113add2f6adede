"""The list of decode rows: every row once, whole or in all its parts, the longest first."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.ops.attention.decode_rule import LIST_COLUMNS, MAX_LISTED_PARTS
from millrace.run.packet.decode_rows import LONG_TOKENS, SPARE, num_words, write_decode_rows


def listed(lengths: list[int], room: int = 0) -> np.ndarray:
    words = np.full(num_words(len(lengths) + room), 777, np.int32)
    tokens = np.arange(len(lengths)) * 3 + 1
    write_decode_rows(words, tokens, tokens + 1000, np.array(lengths, np.int32))
    return words.reshape(LIST_COLUMNS, -1).T


@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_listed_with_all_its_parts(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = (draw.integers(1, 700, 1 + 5 * seed) * np.where(draw.random(1 + 5 * seed) < 0.2, 40, 1)).tolist()
    entries = listed(lengths, room=seed % 3)
    real = entries[entries[:, 2] > 0]
    assert (entries[len(lengths) + SPARE :, 2] == 0).all()
    assert sorted(set(real[:, 0].tolist())) == [3 * row + 1 for row in range(len(lengths))]
    cells: list[int] = []
    for row, length in enumerate(lengths):
        mine = real[real[:, 0] == 3 * row + 1]
        parts = len(mine)
        assert (mine[:, 1] == 3 * row + 1001).all()
        assert (mine[:, 2] == length).all()
        assert sorted(mine[:, 3].tolist()) == list(range(parts))
        assert (mine[:, 4] == parts).all()
        assert parts <= MAX_LISTED_PARTS
        assert parts == 1 or length > LONG_TOKENS
        if parts > 1:
            assert len(set(mine[:, 5].tolist())) == 1
            cells += range(mine[0, 5], mine[0, 5] + parts)
    assert len(cells) == len(set(cells))
    assert all(cell < 2 * SPARE for cell in cells)
    assert (np.diff(real[:, 2] / real[:, 4]) <= 0).all()
    assert (entries[: len(real), 2] > 0).all()


def test_equal_rows_keep_their_order_and_are_not_split() -> None:
    entries = listed([5000] * 20)
    assert entries[:20, 0].tolist() == [3 * row + 1 for row in range(20)]
    assert (entries[:20, 4] == 1).all()
    assert (entries[20:, 2] == 0).all()


def test_one_long_row_takes_the_maximum_number_of_parts() -> None:
    entries = listed([100] * 30 + [32_000])
    assert entries[0].tolist()[:6] == [91, 1091, 32_000, 0, MAX_LISTED_PARTS, 0]
    assert entries[:MAX_LISTED_PARTS, 3].tolist() == list(range(MAX_LISTED_PARTS))
    assert (entries[:, 0] == 91).sum() == MAX_LISTED_PARTS


def test_no_rows() -> None:
    assert (listed([], room=4)[:, 2] == 0).all()
