"""What the host sends to a GPU for one step: one array of int32, laid out for the bucket that the step is padded to.

Padding is ordinary work on things that nobody owns: a padded token is token 0 of a row whose block table is all
scratch. A step in which every row has one token pads with further such rows; any other pads with one row that has all
the missing tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.plan.step import Int32s, Int64s, StepPlan
from millrace.run.request_table import RequestTable

ALIGN = 16
"""Sections start at multiples of this many words, so that kernels see equally aligned addresses in every bucket."""
ON_DEVICE = -1
"""Stands in the host's token column where the token was drawn on the device."""
KEPT_LAYOUTS = 1024
SHARED_UNIT = 128
"""Tokens of a shared prefix that attention reads at a time."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes a step is padded to. Decode: as many tokens as rows, no tiles unless every query is tiled."""

    tokens: int
    rows: int
    tiles: int
    is_decode: bool
    long_from: int = 0
    """Rows with at least this many tokens have no tiles: the library attends to them. 0 for none."""
    shares: bool = False
    """Decode: all rows begin with the same blocks, and their keys are read for many rows at once."""
    has_singles: bool = True
    """Whether rows with one query may be among others; if not, the padding's are tiled whatever their number."""
    last_only: bool = False
    """In the last layer only the last token of each row goes all the way; hidden states are then counted in rows."""


@dataclass(frozen=True, slots=True)
class Section:
    start: int
    length: int

    def of(self, packet: Int32s) -> Int32s:
        return packet[self.start : self.start + self.length]


class PacketLayout:
    """Where things are in the packet of one bucket. What is sampled has the same place in all buckets."""

    def __init__(self, bucket: Bucket, max_rows: int) -> None:
        self.bucket = bucket
        self._end = 0
        self.num_updates = self._take(1)
        self.shared_len = self._take(1)
        self.sample_states = self._take(max_rows)
        """Which of the step's hidden states, of tokens or, with `last_only`, of rows, precede a draw."""
        self.sample_rows = self._take(max_rows)
        self.sample_positions = self._take(max_rows)
        self.table_rows = self._take(bucket.rows)
        self.starts = self._take(bucket.rows)
        self.query_starts = self._take(bucket.rows + 1)
        self.seq_lens = self._take(bucket.rows)
        self.tokens_in = self._take(bucket.tokens)
        self.token_rows = self._take(0 if bucket.is_decode else bucket.tokens)
        self.tiles = self._take(2 * bucket.tiles)
        self.last_tokens = self._take(bucket.rows if bucket.last_only else 0)
        self.updates_start = self._end

    def _take(self, length: int) -> Section:
        section = Section(self._end, length)
        self._end += -(-length // ALIGN) * ALIGN
        return section


class PacketWriter:
    def __init__(self, *, max_rows: int, block_size: int, queries_per_tile: int, tile_singles: bool) -> None:
        self._max_rows = max_rows
        self._block_size = block_size
        self._queries_per_tile = queries_per_tile
        self._tile_singles = tile_singles
        self._layouts: dict[Bucket, PacketLayout] = {}

    def layout(self, bucket: Bucket) -> PacketLayout:
        if bucket not in self._layouts:
            if len(self._layouts) >= KEPT_LAYOUTS:  # uncaptured steps have layouts of their own, any number of them
                self._layouts.clear()
            self._layouts[bucket] = PacketLayout(bucket, self._max_rows)
        return self._layouts[bucket]

    def num_tiles(self, counts: Int32s, long_from: int = 0) -> int:
        return int((-(-counts[self._tiled(counts, long_from)] // self._queries_per_tile)).sum())

    def _tiled(self, counts: Int32s, long_from: int) -> Int64s:
        """Rows whose queries are cut into tiles."""
        tiled = counts > (0 if self._tile_singles else 1)
        return np.flatnonzero(tiled & (counts < long_from) if long_from else tiled)

    def write(self, plan: StepPlan | None, table: RequestTable, bucket: Bucket, packet: Int32s) -> int:
        """Fill the packet and return the words used. No plan is a step of padding alone."""
        layout = self.layout(bucket)
        if plan is None:
            rows = starts = counts = np.zeros(0, np.int32)
            due: Int64s = np.zeros(0, np.int64)
        else:
            rows, starts, counts = plan.rows, plan.starts, plan.counts
            due = np.flatnonzero(plan.samples)
        query_starts = self._write_rows(layout, rows, starts, counts, packet)
        tokens_in = layout.tokens_in.of(packet)
        tokens_in[:] = ON_DEVICE
        tokens_in[int(query_starts[len(rows)]) :] = 0
        _write_known_tokens(rows, starts, counts, table, query_starts, tokens_in)
        if bucket.tiles:
            self._write_tiles(layout, packet)
        if bucket.last_only:
            layout.last_tokens.of(packet)[:] = query_starts[1:] - 1
        states = due.astype(np.int32) if bucket.last_only else query_starts[due + 1] - 1
        self._write_samples(layout, packet, states, rows[due], (starts + counts)[due])
        layout.shared_len.of(packet)[0] = 0 if plan is None else self.shared_tokens(plan)
        return self._write_updates(layout, plan, packet)

    def shared_tokens(self, plan: StepPlan) -> int:
        """Tokens that all rows share, in the units that attention takes."""
        return plan.shared_blocks * self._block_size // SHARED_UNIT * SHARED_UNIT

    def _write_rows(self, layout: PacketLayout, rows: Int32s, starts: Int32s, counts: Int32s, packet: Int32s) -> Int32s:
        bucket, num_rows = layout.bucket, len(rows)
        table_rows, row_starts = layout.table_rows.of(packet), layout.starts.of(packet)
        query_starts, seq_lens = layout.query_starts.of(packet), layout.seq_lens.of(packet)
        table_rows[:num_rows], table_rows[num_rows:] = rows, self._max_rows
        row_starts[:num_rows], row_starts[num_rows:] = starts, 0
        np.add(starts, counts, out=seq_lens[:num_rows])
        if bucket.is_decode:
            query_starts[:] = np.arange(bucket.rows + 1, dtype=np.int32)
            seq_lens[num_rows:] = 1
            return query_starts
        query_starts[0] = 0
        np.cumsum(counts, out=query_starts[1 : num_rows + 1])
        query_starts[num_rows + 1 :] = bucket.tokens
        seq_lens[num_rows:] = 1  # a row without queries may still be asked for its last token
        padding = bucket.tokens - int(query_starts[num_rows])
        if padding:
            seq_lens[num_rows] = padding
        layout.token_rows.of(packet)[:] = np.repeat(np.arange(bucket.rows, dtype=np.int32), np.diff(query_starts))
        return query_starts

    def _write_tiles(self, layout: PacketLayout, packet: Int32s) -> None:
        """(row, first query) of each tile, the padding's row included; -1 beyond."""
        counts = np.diff(layout.query_starts.of(packet))
        bucket = layout.bucket
        wanted = self._tiled(counts, bucket.long_from) if bucket.has_singles else np.flatnonzero(counts)
        per_row = -(-counts[wanted] // self._queries_per_tile)
        total = int(per_row.sum())
        tiles = layout.tiles.of(packet).reshape(-1, 2)
        tiles[total:] = -1
        tiles[:total, 0] = np.repeat(wanted, per_row)
        before = np.repeat(np.cumsum(per_row) - per_row, per_row)
        tiles[:total, 1] = (np.arange(total) - before) * self._queries_per_tile

    def _write_samples(
        self, layout: PacketLayout, packet: Int32s, states: Int32s, rows: Int32s, positions: Int32s
    ) -> None:
        count = len(rows)
        for section, values, filler in (
            (layout.sample_states, states, 0),
            (layout.sample_rows, rows, -1),
            (layout.sample_positions, positions, 0),
        ):
            column = section.of(packet)
            column[:count] = values
            column[count:] = filler

    def _write_updates(self, layout: PacketLayout, plan: StepPlan | None, packet: Int32s) -> int:
        count = 0 if plan is None else len(plan.block_ids)
        end = layout.updates_start + 3 * count
        if end > len(packet):
            raise ValueError(f"{count} block updates do not fit the packet")
        layout.num_updates.of(packet)[0] = count
        if plan is not None and count:
            updates = packet[layout.updates_start : end].reshape(count, 3)
            updates[:, 0], updates[:, 1], updates[:, 2] = plan.block_rows, plan.block_cols, plan.block_ids
        return end


def _write_known_tokens(
    rows: Int32s,
    starts: Int32s,
    counts: Int32s,
    table: RequestTable,
    query_starts: Int32s,
    tokens_in: npt.NDArray[np.int32],
) -> None:
    """Token ids that the host gave at admission; the others were drawn on the device."""
    for index in np.flatnonzero(starts < table.num_admitted[rows]).tolist():
        start, count, first = int(starts[index]), int(counts[index]), int(query_starts[index])
        given = table.tokens[int(rows[index])][start : start + count]
        tokens_in[first : first + len(given)] = given
