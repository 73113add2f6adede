"""Prepares a step's inputs on the device: updates block tables and row records, then gathers the inputs of each token.

The host sends one int32 packet per step. These kernels turn it into what the model reads: token ids, positions, places
in the cache, embeddings and rotary angles. If every row has one token, a single kernel does all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.row_records import ROW_WORD

UPDATE_PROGRAMS = 32
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Updates:
    """Changes to block tables and row records. The counts are read on the device."""

    triples: Tensor
    """int32: (row, column, block id) triples, each table entry at most once; then, from the next multiple of `align`
    words on, the records of new rows. Rows count through the tables of all KV groups: group * number of rows + row."""
    num_triples: Tensor
    num_records: Tensor
    columns: Tensor
    """int32 [rows, words]: records of all rows."""
    align: int


@dataclass(frozen=True, slots=True)
class TokenTables:
    """Lookup tables for token ids and positions."""

    embedding: Tensor | None
    """[vocab, hidden]"""
    embedding_scale: float
    """Embeddings are multiplied by it in float32 and rounded once."""
    angles: Tensor | None
    """float32 [ropes, positions, rotary_dim]"""


@triton.jit
def _update(
    updates, count, tables, table_stride, num_records_ptr, columns,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, WORDS: tl.constexpr, ROW_WORD: tl.constexpr,
):  # fmt: skip
    """Apply this program's share of the updates."""
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


@triton.jit
def _update_kernel(
    updates, num_updates_ptr, tables, table_stride, num_records_ptr, columns,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, WORDS: tl.constexpr, ROW_WORD: tl.constexpr,
):  # fmt: skip
    count = tl.load(num_updates_ptr)
    _update(updates, count, tables, table_stride, num_records_ptr, columns, BLOCK, ALIGN, WORDS, ROW_WORD)


@triton.jit
def _updated(updates, count, row, column, block, BLOCK: tl.constexpr):
    """The block id that the updates give this table entry, or `block`: other programs update the table concurrently."""
    found = tl.full([BLOCK], -1, tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        same_row = tl.load(updates + at * 3, mask=inside, other=-1) == row
        same_column = tl.load(updates + at * 3 + 1, mask=inside, other=-1) == column
        new = tl.load(updates + at * 3 + 2, mask=inside, other=-1)
        found = tl.where(same_row & same_column, new, found)
    newest = tl.max(found, 0)
    return tl.where(newest >= 0, newest, block)


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(
    tokens_in, token_rows, table_rows, starts, query_starts, last_tokens, tables, table_stride,
    updates, num_updates_ptr, num_records_ptr, columns,
    embedding, embedding_scale, angle_table, rope_stride, num_tokens, rows_per_group,
    token_ids, positions, block_ids, block_ids_stride, offsets, embedded, angles,
    BS: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, WORDS: tl.constexpr,
    ROW_WORD: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, SCALED: tl.constexpr,
    ROPES: tl.constexpr, ROTARY: tl.constexpr, ROTARY_BLOCK: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token per program. SINGLE: every row has one token, token i belongs to row i, and updates are applied
    here."""
    wait_for_previous_kernel(EARLY)
    count = tl.load(num_updates_ptr)
    at = tl.program_id(0)
    row = at
    offset = 0
    if not SINGLE:
        row = tl.load(token_rows + at)
        offset = at - tl.load(query_starts + row)
    table_row = tl.load(table_rows + row)
    position = tl.load(starts + row) + offset
    given = tl.load(tokens_in + at).to(tl.int64)
    # A place without a token writes to the scratch block; its position may be beyond the row's table.
    is_used = given >= -1
    token = tl.where(given < 0, tl.load(last_tokens + table_row.to(tl.int64)), given)
    block = tl.load(tables + table_row.to(tl.int64) * table_stride + position // BS, mask=is_used, other=0)
    if HIDDEN > 0:
        item = tl.arange(0, HIDDEN_BLOCK)
        values = tl.load(embedding + token * HIDDEN + item, mask=item < HIDDEN, other=0.0)
        if SCALED:
            values = (values.to(tl.float32) * embedding_scale).to(values.dtype)
        tl.store(embedded + at.to(tl.int64) * HIDDEN + item, values, mask=item < HIDDEN)
    turn = tl.arange(0, ROTARY_BLOCK)
    for rope in tl.static_range(ROPES):
        angle_row = angle_table + rope * rope_stride + position.to(tl.int64) * ROTARY
        angle = tl.load(angle_row + turn, mask=turn < ROTARY, other=0.0)
        place = (rope * num_tokens + at).to(tl.int64) * ROTARY + turn
        tl.store(angles + place, angle, mask=turn < ROTARY)
    for group in tl.static_range(GROUPS):
        group_row = table_row + group * rows_per_group
        if group > 0:
            block = tl.load(tables + group_row.to(tl.int64) * table_stride + position // BS, mask=is_used, other=0)
        if SINGLE:
            block = _updated(updates, count, group_row, position // BS, block, BLOCK)
        tl.store(block_ids + group * block_ids_stride + at, tl.where(is_used, block, 0).to(tl.int64))
    if SINGLE:
        _update(updates, count, tables, table_stride, num_records_ptr, columns, BLOCK, ALIGN, WORDS, ROW_WORD)
    tl.store(token_ids + at, token)
    tl.store(positions + at, position.to(tl.int64))
    tl.store(offsets + at, (position % BS).to(tl.int64))


def gather(
    *,
    tokens_in: Tensor,
    token_rows: Tensor | None,
    table_rows: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    updates: Updates,
    block_size: int,
    looked_up: TokenTables,
    token_ids: Tensor,
    positions: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Apply the updates to `tables` [groups, rows, width] and the records, and fill token_ids and positions [T] and the
    places in the cache: block_ids [groups, T] and offsets [T]. A negative id in `tokens_in` stands for the row's last
    token; without `token_rows` every row has one token. Returns the embeddings [T, hidden] and the angles [ropes, T,
    rotary_dim]; None without a table."""
    count, single = token_ids.shape[0], token_rows is None
    matrix, turns = looked_up.embedding, looked_up.angles
    embedded = None if matrix is None else matrix.new_empty((count, matrix.shape[1]))
    angles = None if turns is None else turns.new_empty((turns.shape[0], count, turns.shape[2]))
    hidden = 0 if matrix is None else matrix.shape[1]
    rotary = 1 if turns is None else turns.shape[2]
    sizes = {"BLOCK": BLOCK, "ALIGN": updates.align, "WORDS": updates.columns.shape[1], "ROW_WORD": ROW_WORD}
    changes = (updates.triples, updates.num_triples, updates.num_records, updates.columns)
    if not single:
        triples, num_triples, num_records, columns = changes
        _update_kernel[(UPDATE_PROGRAMS,)](
            triples, num_triples, tables, tables.stride(1), num_records, columns, **sizes, num_warps=4
        )
    _gather_kernel[(count,)](
        tokens_in, token_rows, table_rows, starts, query_starts, last_tokens, tables, tables.stride(1), *changes,
        matrix, looked_up.embedding_scale, turns, 0 if turns is None else turns.stride(0), count, tables.shape[1],
        token_ids, positions, block_ids, block_ids.stride(0), offsets, embedded, angles,
        BS=block_size, SINGLE=single, GROUPS=tables.shape[0], **sizes,
        HIDDEN=hidden, HIDDEN_BLOCK=triton.next_power_of_2(max(1, hidden)), SCALED=looked_up.embedding_scale != 1.0,
        ROPES=0 if turns is None else turns.shape[0], ROTARY=rotary, ROTARY_BLOCK=triton.next_power_of_2(rotary),
        num_warps=4, **pdl_options(tables.device),
    )  # fmt: skip
    return embedded, angles
