"""The layout of a packet: which section of words holds what, for each step shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.step import Int32s, StepShape
from millrace.run.packet.decode_rows import MIN_LISTED_ROWS, num_words
from millrace.run.sampling.draw_plan import NO_MASK
from millrace.run.shapes.keys import ShapeKey

ALIGN = 16
"""Sections start at multiples of this many words, so that kernels see the same alignment in every shape."""


@dataclass(frozen=True, slots=True)
class Section:
    start: int
    length: int

    def of(self, packet: Int32s) -> Int32s:
        return packet[self.start : self.start + self.length]


class PacketLayout:
    """The sections of a shape's packet. Those up to `mask_lines` are at the same place in every shape.

    The sections that heads read have `middle` entries for each head group: those of the full group end at `middle`,
    those of the greedy group begin there. So the used entries are contiguous, whichever groups there are, and a head
    of n states reads the n entries before or after the middle.

    The fixed part is followed by the block-table updates, three words each, and, aligned, the records of new rows.
    """

    def __init__(
        self, shape: StepShape, key: ShapeKey, num_tiles: int, max_rows: int, has_drafts: bool = False
    ) -> None:
        self.shape = shape
        self.key = key
        is_decode = shape.kind == "decode"
        self._end = 0
        self.num_updates = self._take(1)
        self.num_records = self._take(1)
        self.shared_len = self._take(1)
        self.drawn_start = self._take(1)
        """Index in the ring of drawn tokens at which this step's tokens begin."""
        self.mask_address = self._take(2)
        """int64: address of the masks of this step."""
        self.middle = aligned(max_rows)
        self.sample_states = self._take(2 * self.middle)
        """Indices of the hidden states to draw from; with `last_only` these are row numbers."""
        self.sample_rows = self._take(2 * self.middle)
        self.sample_positions = self._take(2 * self.middle)
        self.sample_index = self._take(2 * self.middle)
        """Where each token goes, counted from `drawn_start`: tokens are in plan order, whatever their group."""
        self.mask_lines = self._take(self.middle)
        """Full group only: line of each state's mask, NO_MASK for none."""
        self.table_rows = self._take(shape.rows)
        self.starts = self._take(shape.rows)
        self.query_starts = self._take(shape.rows + 1)
        self.seq_lens = self._take(shape.rows)
        self.max_drafts = self._take(shape.rows if has_drafts else 0)
        """Drafts that each row may have; -1 for rows whose start the host knows."""
        self.tokens_in = self._take(shape.tokens)
        self.token_rows = self._take(shape.tokens if not is_decode or shape.places > 1 else 0)
        self.slots = self._take(shape.tokens if key.adapters else 0)
        """Adapter slot of each token; 0 for the base model and for padding."""
        self.tiles = self._take(2 * num_tiles)
        self.last_tokens = self._take(shape.rows if key.last_only else 0)
        has_list = key.has_decode_rows and not key.shares_prefix and shape.rows >= MIN_LISTED_ROWS
        has_list = has_list and not shape.places
        self.decode_rows = self._take(num_words(shape.rows) if has_list else 0)
        """The list of decode rows, see `decode_rows.py`."""
        self.updates_start = self._end
        self.decode_tiles = np.arange(2 * num_tiles if is_decode else 0, dtype=np.int32) // 2
        """Tiles of a decode shape in deterministic mode: one per row, from its first query."""
        self.decode_tiles[1::2] = 0
        self.blank = self._blank(max_rows)
        """The part before `tokens_in` with padding rows only. It is written first; real rows then overwrite it."""

    def _take(self, length: int) -> Section:
        section = Section(self._end, length)
        self._end += aligned(length)
        return section

    def _blank(self, max_rows: int) -> Int32s:
        blank = np.zeros(self.tokens_in.start, np.int32)
        self.sample_rows.of(blank)[:] = -1
        self.mask_lines.of(blank)[:] = NO_MASK
        self.table_rows.of(blank)[:] = max_rows
        per_row = self.shape.tokens_per_row
        self.seq_lens.of(blank)[:] = per_row  # a row without queries may still be read for its last token
        self.max_drafts.of(blank)[:] = -1
        if self.shape.kind == "decode":
            self.query_starts.of(blank)[:] = np.arange(self.shape.rows + 1) * per_row
        else:
            self.query_starts.of(blank)[1:] = self.shape.tokens
        return blank


def aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN
