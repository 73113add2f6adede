"""A step's inputs made on the device: tables brought up to date, then token ids, positions and places gathered.

The host sends one packed array of int32 per step. These two kernels turn it into what the model reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.sampling import ROW_WORD

UPDATE_PROGRAMS = 32
BLOCK = 256


@triton.jit
def _update_kernel(
    updates, num_updates_ptr, tables, table_stride, num_records_ptr, columns,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, WORDS: tl.constexpr, ROW_WORD: tl.constexpr,
):  # fmt: skip
    """`updates` are (row, column, block id), one after the other; behind them, aligned, the records of new rows."""
    count = tl.load(num_updates_ptr)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        row = tl.load(updates + at * 3, mask=inside, other=0).to(tl.int64)
        column = tl.load(updates + at * 3 + 1, mask=inside, other=0)
        block = tl.load(updates + at * 3 + 2, mask=inside, other=0)
        tl.store(tables + row * table_stride + column, block, mask=inside)
    records = updates + (count * 3 + ALIGN - 1) // ALIGN * ALIGN
    word = tl.arange(0, WORDS)
    for index in range(tl.program_id(0), tl.load(num_records_ptr), tl.num_programs(0)):
        record = records + index * WORDS
        table_row = tl.load(record + ROW_WORD).to(tl.int64)
        tl.store(columns + table_row * WORDS + word, tl.load(record + word))


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    tokens_in, token_rows, table_rows, starts, query_starts, last_tokens, tables, table_stride, num_tokens,
    token_ids, positions, slots, BS: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """With SINGLE every row has one token: token i is that of row i."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    if SINGLE:
        row = at
        offset = 0
    else:
        row = tl.load(token_rows + at, mask=inside, other=0)
        offset = at - tl.load(query_starts + row, mask=inside, other=0)
    table_row = tl.load(table_rows + row, mask=inside, other=0).to(tl.int64)
    position = tl.load(starts + row, mask=inside, other=0) + offset
    drawn = tl.load(last_tokens + table_row, mask=inside, other=0)
    given = tl.load(tokens_in + at, mask=inside, other=0).to(tl.int64)
    tl.store(token_ids + at, tl.where(given < 0, drawn, given), mask=inside)
    tl.store(positions + at, position.to(tl.int64), mask=inside)
    block = tl.load(tables + table_row * table_stride + position // BS, mask=inside, other=0)
    tl.store(slots + at, block.to(tl.int64) * BS + position % BS, mask=inside)


def update_tables(
    updates: Tensor, num_updates: Tensor, tables: Tensor, num_records: Tensor, columns: Tensor, *, align: int
) -> None:
    """tables[row, column] = block id for the first `num_updates` triples, and columns[row] = record for the
    `num_records` records that follow them at a multiple of `align` words. The counts are read on the device."""
    _update_kernel[(UPDATE_PROGRAMS,)](
        updates, num_updates, tables, tables.stride(0), num_records, columns,
        BLOCK=BLOCK, ALIGN=align, WORDS=columns.shape[1], ROW_WORD=ROW_WORD, num_warps=4,
    )  # fmt: skip


def gather(
    *,
    tokens_in: Tensor,
    token_rows: Tensor | None,
    table_rows: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Fill token_ids, positions and slots [T]. A negative `tokens_in` stands for the row's last token."""
    count = token_ids.shape[0]
    _gather_kernel[(triton.cdiv(count, BLOCK),)](
        tokens_in, token_rows, table_rows, starts, query_starts, last_tokens, tables, tables.stride(0), count,
        token_ids, positions, slots, BS=block_size, BLOCK=BLOCK, SINGLE=token_rows is None, num_warps=4,
    )  # fmt: skip
