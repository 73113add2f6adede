"""The packet: all that the host sends to the GPU for one step, as one int32 array laid out for the step's shape.

Padding is ordinary work on data that no request owns: a padding token is token 0 of a row whose block table holds only
the scratch block. A decode step is padded with one-token rows; any other step with one row that has all padding tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millrace.ops.attention.decode_rule import SHARED_UNIT
from millrace.plan.step import Bools, Int32s, Int64s, StepPlan, StepShape
from millrace.run.packet.decode_rows import advance_decode_rows, write_decode_rows
from millrace.run.packet.layout import PacketLayout, Section, aligned
from millrace.run.sampling.draw_plan import DrawPlan
from millrace.run.shapes.table import NO_LIMIT, ShapeTable
from millrace.run.table.request_table import ON_DEVICE, RequestTable

KEPT_LAYOUTS = 1024
FEW_ROWS = 8
"""Up to this many rows a Python loop beats NumPy calls."""
FIRST_TILES = 1024
"""Initial length of the table of first queries, in tiles of one row."""

Integers = npt.NDArray[np.integer]


class _Template:
    """The fixed part of the packet of a decode step in which every row draws. A step that repeats it differs only in
    the rows' positions."""

    def __init__(
        self, layout: PacketLayout, packet: Int32s, num_rows: int, draws: DrawPlan, order: Int64s | None, epoch: int
    ) -> None:
        self._layout = layout
        self._draws = draws
        self._epoch = epoch
        self._words = words = packet[: layout.updates_start].copy()
        self._order = order
        """Order of the list of decode rows, or None if the list cannot be advanced."""
        self._by_group = draws.order
        self._starts, self._ends = (section.of(words)[:num_rows] for section in (layout.starts, layout.seq_lens))
        self._positions = words[_group_entries(layout.sample_positions, layout, draws)]
        self._decode_rows = layout.decode_rows.of(words)
        self._lengths = layout.seq_lens.of(words)
        # A row that has drawn has no tokens from the host left.
        layout.tokens_in.of(words)[:num_rows] = ON_DEVICE

    def fits(self, plan: StepPlan, layout: PacketLayout, draws: DrawPlan | None) -> bool:
        return plan.repeats(self._epoch) and self._layout is layout and self._draws is draws

    def write(self, starts: Int32s, packet: Int32s) -> None:
        self._starts[:] = starts
        np.add(starts, 1, out=self._ends)
        self._positions[:] = self._ends if self._by_group is None else self._ends[self._by_group]
        if len(self._decode_rows):
            self._write_decode_rows()
        packet[: len(self._words)] = self._words

    def _write_decode_rows(self) -> None:
        order = self._order
        if order is None or not advance_decode_rows(self._decode_rows, order, self._lengths):
            self._order = _list_all_rows(self._layout, self._words)


class PacketWriter:
    def __init__(self, shapes: ShapeTable) -> None:
        self.shapes, facts = shapes, shapes.facts
        self._max_rows = facts.max_rows
        self._block_size = facts.block_size
        self._queries_per_tile = queries_per_tile = facts.queries_per_tile
        self.tile_decode_rows = facts.tile_decode_rows
        self._layouts: dict[StepShape, PacketLayout] = {}
        self._firsts = np.arange(FIRST_TILES, dtype=np.int32) * queries_per_tile
        """First query of each tile of a row."""
        self._template: _Template | None = None
        """Template of the last packet, if the next step may repeat it."""

    def layout(self, shape: StepShape) -> PacketLayout:
        layout = self._layouts.get(shape)
        if layout is None:
            if len(self._layouts) >= KEPT_LAYOUTS:  # each uncaptured step adds a layout
                self._layouts.clear()
            shapes = self.shapes
            sizes = (shapes.tiles(shape), self._max_rows, shapes.facts.has_drafts)
            layout = self._layouts[shape] = PacketLayout(shape, shapes.key_of(shape), *sizes)
        return layout

    def _is_tiled(self, counts: Int32s, long_from: int) -> Bools:
        """True for rows whose queries are tiled."""
        tiled: Bools = counts > (0 if self.tile_decode_rows else 1)
        return tiled & (counts < long_from) if long_from else tiled

    def _tiles_of(
        self, lengths: list[int], long_from: int, *, first: int = 0, decode_rows: bool = False
    ) -> list[tuple[int, int]]:
        """(row, number of tiles) of each tiled row, for few rows, from row `first` on. `decode_rows`: tile rows with
        one query too."""
        min_length, limit = 1 if decode_rows or self.tile_decode_rows else 2, long_from or NO_LIMIT
        return [
            (row, -(-length // self._queries_per_tile))
            for row, length in enumerate(lengths, first)
            if min_length <= length < limit
        ]

    def write(
        self,
        plan: StepPlan | None,
        table: RequestTable,
        shape: StepShape,
        packet: Int32s,
        draws: DrawPlan | None = None,
        records: Int32s | None = None,
        drawn_start: int = 0,
        mask_address: int = 0,
        num_sent: int = 0,
    ) -> int:
        """Fill the packet and return the number of words used. Without a plan the step holds only padding; without
        `draws` no row draws. `records` [n, words]: one for each row that the step admits. `num_sent`: block-table
        updates of the plan that were sent before."""
        layout, template = self.layout(shape), self._template
        if plan is not None and template is not None and template.fits(plan, layout, draws):
            template.write(plan.starts, packet)
        else:
            self._template = self._write_rows(plan, draws, table, layout, packet)
        packet[layout.drawn_start.start] = drawn_start
        layout.mask_address.of(packet).view(np.int64)[0] = mask_address
        packet[layout.shared_len.start] = 0 if plan is None else self.shared_tokens(plan)
        return _write_records(layout, _write_updates(layout, plan, table, packet, num_sent), packet, records)

    def _write_rows(
        self,
        plan: StepPlan | None,
        draws: DrawPlan | None,
        table: RequestTable,
        layout: PacketLayout,
        packet: Int32s,
    ) -> _Template | None:
        """Write the fixed part; returns a template of it if the next step may repeat this one."""
        shape = layout.shape
        packet[: len(layout.blank)] = layout.blank
        if plan is None:
            rows = starts = counts = np.zeros(0, np.int32)
        else:
            rows, starts, counts = plan.rows, plan.starts, plan.counts
        ends = starts + counts
        _put(packet, layout.table_rows, rows)
        _put(packet, layout.starts, starts)
        _put(packet, layout.seq_lens, ends)
        if shape.kind == "decode":
            total = len(rows) * shape.tokens_per_row
            layout.tiles.of(packet)[:] = layout.decode_tiles
            if shape.places > 1:
                layout.token_rows.of(packet)[:] = np.arange(shape.rows).repeat(shape.places)
        else:
            total = self._write_queries(layout, counts, packet)
        first, last = layout.tokens_in.start, layout.tokens_in.start + shape.tokens
        packet[first : first + total] = ON_DEVICE
        packet[first + total : last] = 0
        if layout.key.adapters:
            counted = counts if shape.kind != "decode" else shape.tokens_per_row
            _put_padded(packet, layout.slots, table.adapters[rows].repeat(counted))
        query_starts = layout.query_starts.of(packet)
        last_tokens = query_starts[1:] - 1
        if layout.key.last_only:
            _put(packet, layout.last_tokens, last_tokens)
        order = _write_decode_rows(layout, packet, counts) if layout.decode_rows.length else None
        if plan is None:
            return None
        _write_host_tokens(rows, starts, counts, table, query_starts, packet[first:last])
        if plan.draft_places is not None:
            _put(packet, layout.max_drafts, np.where(plan.samples & (counts == 1), plan.draft_places, -1))
        if shape.places > 1:
            _write_forced(plan, packet[first:last].reshape(-1, shape.places))
        if draws is None or not len(draws.due):
            return None
        states = np.arange(len(rows)) if layout.key.last_only or shape.places > 1 else last_tokens[: len(rows)]
        _write_samples(layout, packet, draws, (states, rows, ends))
        repeatable = shape.kind == "decode" and not shape.places and len(draws.due) == len(rows)
        return _Template(layout, packet, len(rows), draws, order, plan.epoch) if repeatable else None

    def shared_tokens(self, plan: StepPlan) -> int:
        """Length of the shared prefix, rounded down to SHARED_UNIT."""
        return plan.shared_blocks * self._block_size // SHARED_UNIT * SHARED_UNIT

    def _write_queries(self, layout: PacketLayout, counts: Int32s, packet: Int32s) -> int:
        """Write query starts, token rows and tiles of a step with chunks; returns the number of real tokens."""
        shape, num_rows = layout.shape, len(counts)
        total = _write_query_starts(packet, layout.query_starts.start + 1, counts)
        padding = shape.tokens - total
        if padding:
            packet[layout.seq_lens.start + num_rows] = padding
        at = layout.token_rows.start
        packet[at : at + total] = 0 if num_rows == 1 else np.arange(num_rows, dtype=np.int32).repeat(counts)
        packet[at + total : at + shape.tokens] = num_rows
        if layout.tiles.length:
            self._write_tiles(layout, counts, padding, packet)
        return total

    def _write_tiles(self, layout: PacketLayout, counts: Int32s, padding: int, packet: Int32s) -> None:
        """(row, first query) of each tile, padding included, the last tiles first; the rest is -1."""
        tiles, long_from, tile_all = layout.tiles.of(packet), layout.key.long_from, not layout.key.has_decode_rows
        first = 0  # Rows with one query come first and are not tiled.
        if len(counts) and not (tile_all or self.tile_decode_rows):
            first = int((counts != 1).argmax())
        if len(counts) - first <= FEW_ROWS:
            at, lengths = 0, [*counts[first:].tolist(), padding]
            for row, num_tiles in self._tiles_of(lengths, long_from, first=first, decode_rows=tile_all)[::-1]:
                end = at + 2 * num_tiles
                tiles[at:end:2], tiles[at + 1 : end : 2] = row, self._first_queries(num_tiles)[::-1]
                at = end
            tiles[at:] = -1
            return
        every = np.append(counts, np.int32(padding))
        tiled = np.flatnonzero(every if tile_all else self._is_tiled(every, long_from))
        per_row = -(-every[tiled] // self._queries_per_tile)
        total = int(per_row.sum())
        tiles[0 : 2 * total : 2] = tiled.repeat(per_row)[::-1]
        before = (per_row.cumsum() - per_row).repeat(per_row)
        tiles[1 : 2 * total : 2] = ((np.arange(total) - before) * self._queries_per_tile)[::-1]
        tiles[2 * total :] = -1

    def _first_queries(self, num_tiles: int) -> Int32s:
        if num_tiles > len(self._firsts):
            self._firsts = np.arange(2 * num_tiles, dtype=np.int32) * self._queries_per_tile
        return self._firsts[:num_tiles]


def _write_forced(plan: StepPlan, tokens_in: npt.NDArray[np.int32]) -> None:
    """Write the drafts that the plan gives. `tokens_in` [rows, places]: they follow the row's own token."""
    for forced in plan.forced:
        own = forced.tokens[: tokens_in.shape[1] - 1]
        tokens_in[np.flatnonzero(plan.rows == forced.row)[0], 1 : 1 + len(own)] = own


def _put(packet: Int32s, section: Section, values: Integers) -> None:
    packet[section.start : section.start + len(values)] = values


def _put_padded(packet: Int32s, section: Section, values: Integers) -> None:
    _put(packet, section, values)
    packet[section.start + len(values) : section.start + section.length] = 0


def _write_query_starts(packet: Int32s, start: int, counts: Int32s) -> int:
    """Write the cumulative ends of the rows at word `start`; returns the last one."""
    if len(counts) > FEW_ROWS:
        ends = packet[start : start + len(counts)]
        counts.cumsum(out=ends)
        return int(ends[-1])
    end = 0
    for index, count in enumerate(counts.tolist(), start):
        end += count
        packet[index] = end
    return end


def _write_decode_rows(layout: PacketLayout, packet: Int32s, counts: Int32s) -> Int64s | None:
    """List the decode rows, a padding row of one token included; returns their order, see `write_decode_rows`."""
    if layout.shape.kind == "decode":
        return _list_all_rows(layout, packet)
    single, num_rows = (counts == 1).nonzero()[0], len(counts)
    if num_rows < layout.shape.rows and layout.shape.tokens - packet[layout.query_starts.start + num_rows] == 1:
        single = np.append(single, num_rows)
    return _list_decode_rows(layout, packet, single)


def _list_all_rows(layout: PacketLayout, packet: Int32s) -> Int64s | None:
    """List all rows of a decode shape, padding included."""
    return _list_decode_rows(layout, packet, slice(None))


def _list_decode_rows(layout: PacketLayout, packet: Int32s, single: slice | Integers) -> Int64s | None:
    columns = (layout.query_starts, layout.table_rows, layout.seq_lens)
    tokens, table_rows, lengths = (section.of(packet)[: layout.shape.rows][single] for section in columns)
    return write_decode_rows(layout.decode_rows.of(packet), tokens, table_rows, lengths)


def _group_entries(section: Section, layout: PacketLayout, draws: DrawPlan) -> slice:
    """The part of a head section that this step uses: the full group up to the middle, the greedy group after it."""
    per_row = layout.shape.tokens_per_row
    start = section.start + layout.middle - len(draws.full) * per_row
    return slice(start, start + len(draws.due) * per_row)


def _write_samples(
    layout: PacketLayout, packet: Int32s, draws: DrawPlan, columns: tuple[Integers, Integers, Integers]
) -> None:
    """`columns`: states, table rows and positions of all rows of the step. With places, states are row numbers."""
    order, all_draw = draws.order, len(draws.due) == len(columns[0])
    if order is not None or not all_draw:
        chosen = draws.due if order is None else draws.due[order]
        columns = tuple(values[chosen] for values in columns)  # type: ignore[assignment]
    index = np.arange(len(draws.due)) if order is None else order
    lines = draws.mask_lines(layout.shape.tokens_per_row) if len(draws.masked) else None
    states, rows, positions = columns
    if (places := layout.shape.places) > 1:
        # A state for each place. The device sets positions, and leaves out unused places.
        every = np.arange(places)
        states, index = (((values * places)[:, None] + every).ravel() for values in (states, index))
        rows, positions = rows.repeat(places), positions.repeat(places)
    sections = (layout.sample_states, layout.sample_rows, layout.sample_positions, layout.sample_index)
    for section, values in zip(sections, (states, rows, positions, index), strict=True):
        packet[_group_entries(section, layout, draws)] = values
    if lines is not None:
        layout.mask_lines.of(packet)[layout.middle - len(lines) :] = lines


def _write_updates(
    layout: PacketLayout, plan: StepPlan | None, table: RequestTable, packet: Int32s, num_sent: int
) -> int:
    """Write the block-table updates after the first `num_sent`; returns the index after the last one."""
    count = 0 if plan is None else len(plan.block_ids) - num_sent
    end = layout.updates_start + 3 * count
    if end > len(packet):
        raise ValueError(f"{count} block updates do not fit into the packet")
    packet[layout.num_updates.start] = count
    if plan is not None and count:
        updates = packet[layout.updates_start : end].reshape(count, 3)
        columns = (table.updated_rows(plan), plan.block_cols, plan.block_ids)
        updates[:, 0], updates[:, 1], updates[:, 2] = (column[num_sent:] for column in columns)
    return end


def _write_records(layout: PacketLayout, end: int, packet: Int32s, records: Int32s | None) -> int:
    count = 0 if records is None else len(records)
    packet[layout.num_records.start] = count
    if records is None or not count:
        return end
    start = layout.updates_start + aligned(end - layout.updates_start)
    end = start + records.size
    if end > len(packet):
        raise ValueError(f"{count} row records do not fit into the packet")
    packet[start:end] = records.reshape(-1)
    return end


def _write_host_tokens(
    rows: Int32s,
    starts: Int32s,
    counts: Int32s,
    table: RequestTable,
    query_starts: Int32s,
    tokens_in: npt.NDArray[np.int32],
) -> None:
    """Write the token ids known to the host since admission; the others were drawn on the device."""
    for index in _rows_with_host_tokens(rows, starts, table):
        start, count, first = int(starts[index]), int(counts[index]), int(query_starts[index])
        known = table.host_part(int(rows[index]), start, count)
        tokens_in[first : first + len(known)] = known


def _rows_with_host_tokens(rows: Int32s, starts: Int32s, table: RequestTable) -> list[int]:
    """Indices of the step's rows that begin with tokens known to the host."""
    if len(rows) > FEW_ROWS:
        at: list[int] = np.flatnonzero(starts < table.num_admitted[rows]).tolist()
        return at
    listed = enumerate(zip(rows.tolist(), starts.tolist(), strict=True))
    return [index for index, (row, start) in listed if start < table.num_admitted[row]]
