"""The list of decode rows, as the GPU's decode attention takes it.

The longest rows come first, so that none of them runs alone at the end; rows much longer than the others are split into
parts. The columns follow one after the other, see `LIST_COLUMNS`.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from millrace.ops.attention.decode_rule import LIST_COLUMNS, MAX_LISTED_PARTS
from millrace.plan.step import Int32s, Int64s

MIN_LISTED_ROWS = 8
"""With fewer rows there is no list: attention splits every row."""
SPARE = 8
"""Entries beyond one per row, for the parts of long rows."""
MAX_SORTED = np.uint16(65_535)
"""Sort key limit: longer rows count as equally long."""
LONG_TOKENS, LONG_SHARE = 1024, 3.0
"""A row is split if it is longer than LONG_TOKENS and than LONG_SHARE times the mean. Combining parts costs as much as
some hundred keys; smaller differences even out when the longest rows come first."""

Integers = npt.NDArray[np.integer]


def num_words(rows: int) -> int:
    return (rows + SPARE) * LIST_COLUMNS


def write_decode_rows(words: Int32s, tokens: Integers, table_rows: Integers, lengths: Integers) -> Int64s | None:
    """Fill `words` (at least num_words(rows) long) with these rows. Returns their order, for `advance_decode_rows`;
    None if a row is split, or too long to be sorted exactly."""
    columns = words.reshape(LIST_COLUMNS, -1)
    count = len(lengths)
    columns[2, count:] = 0
    columns[3], columns[4], columns[5] = 0, 1, 0
    if not count:
        return None
    # 16-bit keys sort in a fraction of the time.
    order = np.argsort(MAX_SORTED - np.minimum(lengths, MAX_SORTED).astype(np.uint16), kind="stable")
    for column, values in enumerate((tokens, table_rows, lengths)):
        columns[column, :count] = values[order]
    longest, split_above = int(columns[2, 0]), _split_above(lengths)
    if longest > split_above:
        _split_rows(columns, count, split_above)
        return None
    return order if longest < int(MAX_SORTED) else None


def advance_decode_rows(words: Int32s, order: Int64s, lengths: Integers) -> bool:
    """Update a list in this order after every row except padding has grown by one token: the order stays the same, with
    padding last. Returns False if the list must be rewritten from `lengths`."""
    listed = words.reshape(LIST_COLUMNS, -1)[2, : len(order)]
    listed[:] = lengths[order]
    longest = int(listed[0])
    return longest < int(MAX_SORTED) and (longest <= LONG_TOKENS or longest <= _split_above(lengths))


def _split_above(lengths: Integers) -> float:
    """Rows longer than this are split."""
    return max(LONG_TOKENS, LONG_SHARE * (int(lengths.sum()) / len(lengths)))


def _split_rows(columns: Int32s, count: int, split_above: float) -> None:
    """Split the longest rows into parts, using the spare entries."""
    cell, spare = 0, count
    for index, parts in _choose_parts(columns[2, : min(SPARE, count)].tolist(), split_above):
        columns[4, index], columns[5, index] = parts, cell
        columns[:, spare : spare + parts - 1] = columns[:, index : index + 1]
        columns[3, spare : spare + parts - 1] = np.arange(1, parts)
        cell, spare = cell + parts, spare + parts - 1
    listed = columns[:, :spare]
    listed[:] = listed[:, np.argsort(-listed[2] / listed[4], kind="stable")]


def _choose_parts(lengths: list[int], split_above: float) -> list[tuple[int, int]]:
    """(row, parts) of the rows to split: add one part at a time to the row with the longest parts, while these exceed
    `split_above`."""
    heap = [(-float(length), row, 1) for row, length in enumerate(lengths) if length > split_above]
    heapq.heapify(heap)
    for _ in range(SPARE):
        longest, row, parts = heap[0]
        if -longest <= split_above or parts == MAX_LISTED_PARTS:
            break
        heapq.heapreplace(heap, (-lengths[row] / (parts + 1), row, parts + 1))
    return [(row, parts) for _, row, parts in heap if parts > 1]
