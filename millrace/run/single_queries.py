"""The list of a step's rows with a single query, as decode attention takes them: the longest first, so that none of
them is left to the end alone, and those in parts that are much longer than the others.

An entry is eight words: the token, the row of the block tables, the length in tokens, which part, of how many, and the
first cell of the row's parts in attention's workspace. The last two are unused. A length of 0 is no entry.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from millrace.plan.step import Int32s

WORDS = 8
LEAST_ROWS = 8
"""Fewer rows are not listed: attention splits them all."""
SPARE = 8
"""Entries beyond one for each row: parts of long rows."""
MOST_PARTS = 8
LONG_TOKENS, LONG_SHARE = 1024, 1.5
"""Rows are cut that are longer than so many tokens, and so many times as long as the mean: joining parts costs as much
as some hundred keys."""

Integers = npt.NDArray[np.integer]


def num_words(rows: int) -> int:
    return (rows + SPARE) * WORDS


def write_singles(words: Int32s, tokens: Integers, table_rows: Integers, lengths: Integers) -> None:
    """Fill `words`, num_words of at least so many rows, with the rows that have these tokens."""
    entries = words.reshape(-1, WORDS)
    count = len(lengths)
    entries[count:] = 0
    if not count:
        return
    order = np.argsort(-lengths, kind="stable")
    listed = entries[:count]
    listed[:, 0], listed[:, 1], listed[:, 2] = tokens[order], table_rows[order], lengths[order]
    listed[:, 3], listed[:, 4], listed[:, 5] = 0, 1, 0
    least = max(LONG_TOKENS, LONG_SHARE * float(lengths.mean()))
    if listed[0, 2] > least:
        _cut(entries, count, least)


def _cut(entries: Int32s, count: int, least: float) -> None:
    """Give the spare entries, one by one, to the row whose parts are the longest, as long as these exceed `least`."""
    heap = [(-float(length), index, 1) for index, length in enumerate(entries[:SPARE, 2].tolist()) if length > least]
    heapq.heapify(heap)
    for _ in range(min(SPARE, len(entries) - count)):
        longest, index, parts = heap[0]
        if -longest <= least or parts == MOST_PARTS:
            break
        heapq.heapreplace(heap, (-float(entries[index, 2]) / (parts + 1), index, parts + 1))
    cell, spare = 0, count
    for _, index, parts in sorted(heap, key=lambda one: one[1]):
        if parts == 1:
            continue
        entries[spare : spare + parts - 1] = entries[index]
        entries[spare : spare + parts - 1, 3] = np.arange(1, parts)
        for part in (slice(index, index + 1), slice(spare, spare + parts - 1)):
            entries[part, 4], entries[part, 5] = parts, cell
        cell, spare = cell + parts, spare + parts - 1
