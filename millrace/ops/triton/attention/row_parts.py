"""Lists the decode rows of a step in parts of about equal size, on the device: one small kernel per step.

With few rows every row is split, and a step is fastest if all parts run at once and take equally long. Captured graphs
cannot change their launches, so the number of entries is fixed and the lengths decide on the device what each one is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.attention.paged_kv import PagedRows
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

UNIT = 64
"""Keys in the unit that parts are made of."""
COLUMNS = 6


@triton.jit(do_not_specialize=["num_rows", "entries"])
def _list_rows_kernel(
    query_starts, seq_lens, table_rows, listed_ptr, num_rows, entries,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program. The columns are those of `LIST_COLUMNS`; entries without a part have length 0."""
    wait_for_previous_kernel(EARLY)
    row = tl.arange(0, ROWS)
    here = row < num_rows
    starts = tl.load(query_starts + row, mask=here, other=0)
    own_rows = tl.load(table_rows + row, mask=here, other=0)
    lengths = tl.load(seq_lens + row, mask=here, other=0)
    is_decode = tl.load(query_starts + row + 1, mask=here, other=0) - starts == QUERIES
    lengths = tl.where(is_decode, lengths, 0)
    units = tl.cdiv(lengths, UNIT)
    if WINDOW > 0:
        units -= tl.maximum(lengths - (QUERIES - 1) - WINDOW, 0) // UNIT

    # The smallest part size, in units, at which there are enough entries. One part per row always fits.
    high = tl.maximum(tl.max(units, 0), 1)
    low = tl.minimum(tl.maximum(tl.cdiv(tl.sum(units, 0), entries), 1), high)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(units, middle), 0) <= entries
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    parts = tl.cdiv(units, low)
    ends = tl.cumsum(parts, 0)

    entry = tl.arange(0, ENTRIES)
    is_here = entry < entries
    is_own = (ends - parts)[None, :] <= entry[:, None]
    is_own &= entry[:, None] < ends[None, :]
    to = listed_ptr + entry
    first = _of_entry(is_own, ends - parts)
    tl.store(to, _of_entry(is_own, starts), mask=is_here)
    tl.store(to + entries, _of_entry(is_own, own_rows), mask=is_here)
    tl.store(to + 2 * entries, _of_entry(is_own, lengths), mask=is_here)
    tl.store(to + 3 * entries, entry - first, mask=is_here)
    tl.store(to + 4 * entries, _of_entry(is_own, parts), mask=is_here)
    tl.store(to + 5 * entries, first, mask=is_here)


@triton.jit
def _of_entry(is_own, values):
    """[ENTRIES]: the value of each entry's row, 0 for entries without one."""
    return tl.sum(tl.where(is_own, values[None, :], 0), 1)


def list_rows(rows: PagedRows, entries: int, window: int = 0, *, queries_per_row: int = 1) -> Tensor:
    """int32 [LIST_COLUMNS, entries]: the rows with exactly `queries_per_row` queries, in parts of about equal size.
    Attention reads the list before it waits for the previous kernel, so another kernel must run in between."""
    num_rows = rows.seq_lens.shape[0]
    if num_rows > entries:
        raise ValueError(f"{num_rows} rows do not fit a list of {entries} entries")
    listed = torch.empty((COLUMNS, entries), dtype=torch.int32, device=rows.seq_lens.device)
    _list_rows_kernel[(1,)](
        rows.query_starts, rows.seq_lens, rows.table_rows, listed, num_rows, entries,
        QUERIES=queries_per_row, WINDOW=window, UNIT=UNIT, ROWS=triton.next_power_of_2(num_rows),
        ENTRIES=triton.next_power_of_2(entries), num_warps=4, **pdl_options(listed.device),
    )  # fmt: skip
    return listed
