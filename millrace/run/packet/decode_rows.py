"""The list of a step's rows with a single query, as decode attention takes them: the longest first, so that none of
them is left to the end alone, and those in parts that are much longer than the others.

Columns, one behind the other: the token, the row of the block tables, the length in tokens, which part, of how many,
and the first cell of the row's parts in attention's workspace. A length of 0 is no entry.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from millrace.plan.step import Int32s, Int64s

COLUMNS = 6
MIN_LISTED_ROWS = 8
"""Fewer rows are not listed: attention splits them all."""
SPARE = 8
"""Entries beyond one for each row: parts of long rows."""
MAX_PARTS = 8
MAX_SORTED = np.uint16(65_535)
"""Longer rows count as equally long."""
LONG_TOKENS, LONG_SHARE = 1024, 3.0
"""Rows are cut that are longer than so many tokens, and so many times as long as the mean. Joining parts costs as much
as some hundred keys, and rows that differ less than that fill each other's gaps if the longest come first."""

Integers = npt.NDArray[np.integer]


def num_words(rows: int) -> int:
    return (rows + SPARE) * COLUMNS


def write_decode_rows(words: Int32s, tokens: Integers, table_rows: Integers, lengths: Integers) -> Int64s | None:
    """Fill `words`, num_words of at least so many rows, with the rows that have these tokens. Returns the order in
    which they are listed, for `advance_decode_rows`; None if some are cut, or so long that their order means little."""
    columns = words.reshape(COLUMNS, -1)
    count = len(lengths)
    columns[2, count:] = 0
    columns[3], columns[4], columns[5] = 0, 1, 0
    if not count:
        return None
    # Numbers of sixteen bits are sorted in a fraction of the time; what is longer than they count is cut in any case.
    order = np.argsort(MAX_SORTED - np.minimum(lengths, MAX_SORTED).astype(np.uint16), kind="stable")
    for column, values in enumerate((tokens, table_rows, lengths)):
        columns[column, :count] = values[order]
    longest, least = int(columns[2, 0]), _least_cut(lengths)
    if longest > least:
        _cut(columns, count, least)
        return None
    return order if longest < int(MAX_SORTED) else None


def advance_decode_rows(words: Int32s, order: Int64s, lengths: Integers) -> bool:
    """Bring a list in this order up to date when all rows, but for those of padding, have become longer by one token.
    They stay in order, padding behind them. False when the list has to be written anew, in its words as they are."""
    listed = words.reshape(COLUMNS, -1)[2, : len(order)]
    listed[:] = lengths[order]
    longest = int(listed[0])
    return longest < int(MAX_SORTED) and (longest <= LONG_TOKENS or longest <= _least_cut(lengths))


def _least_cut(lengths: Integers) -> float:
    """Rows are cut that are longer than this."""
    return max(LONG_TOKENS, LONG_SHARE * (int(lengths.sum()) / len(lengths)))


def _cut(columns: Int32s, count: int, least: float) -> None:
    """Use the spare entries for further parts of the longest rows."""
    cell, spare = 0, count
    for index, parts in _parts_of(columns[2, : min(SPARE, count)].tolist(), least):
        columns[4, index], columns[5, index] = parts, cell
        columns[:, spare : spare + parts - 1] = columns[:, index : index + 1]
        columns[3, spare : spare + parts - 1] = np.arange(1, parts)
        cell, spare = cell + parts, spare + parts - 1
    listed = columns[:, :spare]
    listed[:] = listed[:, np.argsort(-listed[2] / listed[4], kind="stable")]


def _parts_of(lengths: list[int], least: float) -> list[tuple[int, int]]:
    """(row, parts) of the rows to cut: one part more at a time for the row whose parts are the longest, as long as
    these exceed `least`."""
    heap = [(-float(length), row, 1) for row, length in enumerate(lengths) if length > least]
    heapq.heapify(heap)
    for _ in range(SPARE):
        longest, row, parts = heap[0]
        if -longest <= least or parts == MAX_PARTS:
            break
        heapq.heapreplace(heap, (-lengths[row] / (parts + 1), row, parts + 1))
    return [(row, parts) for _, row, parts in heap if parts > 1]
