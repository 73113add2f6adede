"""What a GPU step does, for each shape: the work that is captured as graphs.

The body turns the packet into the hidden states of the rows that draw; the head turns those into tokens. Both read and
write buffers that never move, so either can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millrace.models.batch import DrawnStates, ForwardBatch, LastTokens, Taps
from millrace.models.decoder import Decoder
from millrace.ops.attention.decode_rule import LIST_COLUMNS
from millrace.ops.attention.long_rows import LongRow
from millrace.ops.attention.rows import TiledRows
from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.base.state_rows import StateRows
from millrace.ops.triton.drafts import NUM_COUNTS, AcceptedTokens, DraftedStep, accept_drafts, place_drafts
from millrace.ops.triton.row_records import ROW_WORDS
from millrace.ops.triton.sampling.draw import MaskLines
from millrace.ops.triton.step_inputs import Updates, gather
from millrace.plan.step import QKV_ALONE, HeadShape, Int32s, StepPlan, StepShape
from millrace.run.drafting.device_chain import FedRows
from millrace.run.graphs.device_state import DeviceState
from millrace.run.packet.decode_rows import num_words
from millrace.run.packet.layout import ALIGN, Section
from millrace.run.packet.lookup_tables import token_tables
from millrace.run.packet.mask_ring import MaskRing
from millrace.run.packet.packet_ring import PacketRing, TokenRing
from millrace.run.packet.step_packet import PacketWriter
from millrace.run.sampling.draw_plan import DrawPlan
from millrace.run.sampling.masks import Masks, Uint32s, words_per_mask
from millrace.run.settings import PLACES, RunnerSettings
from millrace.run.shapes.keys import ShapeKey

UPDATES_IN_PACKET = 1 << 15
"""Maximum number of block-table updates in one packet."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Key of the graph that accepts drafts."""

    shape: StepShape | None
    """None for steps with one place for each row: their graph reads nothing that depends on the shape."""

    @classmethod
    def of(cls, shape: StepShape) -> Accept:
        return cls(shape if shape.places > 1 else None)


@dataclass(frozen=True, slots=True)
class Propose:
    """Key of the graph in which a drafter that is a model drafts."""

    rows: int
    places: int


class StepWork:
    def __init__(
        self,
        decoder: Decoder,
        state: DeviceState,
        writer: PacketWriter,
        settings: RunnerSettings,
        *,
        smallest: StepShape,
    ) -> None:
        """`smallest`: any shape; it gives the packet layout of the sections that the head reads."""
        device, spec, table = state.kv[0].device, decoder.spec, state.table
        max_rows, max_tokens = settings.max_rows, settings.max_tokens
        self.decoder = decoder
        self.smallest = smallest
        self._kv = state.kv
        self._table = table
        self._sampler = state.sampler
        self._writer = writer
        self._block_size = settings.block_size
        self._max_rows = max_rows
        self._head_layout = head_layout = writer.layout(smallest)
        words = 9 * head_layout.middle + 8 * (max_rows + 32) + num_words(max_rows + 1)
        words += (7 if settings.adapter_slots else 6) * max_tokens + 3 * UPDATES_IN_PACKET + 512
        self._ring = PacketRing(words + max_rows * ROW_WORDS, device)
        self.packet = self._ring.on_device
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._offsets = torch.zeros_like(self._token_ids)
        self._block_ids = self._token_ids.new_zeros((table.block_tables.shape[0], max_tokens))
        # A padding row has one position per padding token.
        num_positions = max(settings.max_context + (0 if state.drafts is None else PLACES[-1]), max_tokens)
        self._token_tables = token_tables(decoder, num_positions)
        # Indexed like the packet's head sections: the full group before the middle, the greedy group after it.
        self._draw_states = torch.zeros((2 * head_layout.middle, spec.hidden_size), dtype=decoder.dtype, device=device)
        self._logits = torch.empty((max_rows, spec.vocab_size), dtype=torch.float32, device=device)
        self._drawn = TokenRing(max_rows, device)
        self._drafts = state.drafts
        self._chain = state.chain
        self._states = state.states
        self._slots = state.slots
        self._counts = TokenRing(NUM_COUNTS * max_rows, device)
        """NUM_COUNTS numbers of each row, in steps with drafts."""
        self._masks = MaskRing(
            words_per_mask(spec.vocab_size), device, max_states=head_layout.middle, gates=state.gates
        )
        self._placed = TokenRing(max_rows, device)
        """The host's copy of tokens and drafts, for steps whose masks depend on them."""
        self._row_numbers = torch.arange(max_rows + 2, dtype=torch.int32, device=device)

    def send(
        self,
        plan: StepPlan | None,
        shape: StepShape,
        draws: DrawPlan | None = None,
        records: Int32s | None = None,
        num_sent: int = 0,
    ) -> None:
        """Write and send the step's packet; without a plan it holds only padding. `num_sent`: block-table updates that
        were sent before."""
        packet, turn = self._ring.next(), self._ring.turn
        drawn_start, num_masked = self._drawn.start(turn), 0 if draws is None else len(draws.masked)
        masks = self._masks.address(turn, num_masked * shape.tokens_per_row) if num_masked else 0
        parts = (draws, records, drawn_start, masks, num_sent)
        self._ring.send(self._writer.write(plan, self._table, shape, packet, *parts))

    def mask_memory(self, count: int) -> Uint32s:
        """Host memory for masks of the last step sent."""
        return self._masks.host(self._ring.turn, count)

    def key_of(self, shape: StepShape) -> ShapeKey:
        return self._writer.layout(shape).key

    def send_masks_ahead(self, count: int) -> None:
        """Send the masks of the last step sent, one for each row, as soon as they are ready."""
        self._masks.send_when_ready(self._ring.turn, count)

    def masks_ready(self) -> None:
        self._masks.ready(self._ring.turn)

    def send_masks(self, masks: Masks, draws: DrawPlan, num_places: int) -> None:
        """Send the masks of the last step sent; they are read by its head."""
        if masks.places is None:
            self._masks.send(self._ring.turn, masks.bits)
            return
        lines, section = draws.mask_lines(num_places, masks), self._head_layout.mask_lines
        end = section.start + self._head_layout.middle
        self._masks.send(self._ring.turn, masks.bits, lines, self.packet[end - len(lines) : end])

    def placed(self, shape: StepShape, num_rows: int) -> tuple[Tensor, Tensor]:
        """Tokens and drafts of the last step sent, `shape.places` of each row, after `place_drafts`: on the device, and
        the host buffer that they are copied to."""
        section, count = self._writer.layout(shape).tokens_in, num_rows * shape.places
        placed = self.packet[section.start : section.start + count]
        return placed, self._placed.host_tokens(self._ring.turn, count)

    def drawn(self, count: int) -> Tensor:
        """The first `count` tokens drawn by the last step sent."""
        return self._drawn.device_tokens(self._ring.turn, count)

    def drawn_on_host(self, count: int) -> tuple[Tensor, Int32s]:
        """The host buffer that these tokens are copied to, as a tensor and as an array."""
        turn = self._ring.turn
        return self._drawn.host_tokens(turn, count), self._drawn.host_array(turn, count)

    def counts(self, count: int) -> tuple[Tensor, Tensor, Int32s]:
        """NUM_COUNTS numbers of each of the first `count` rows of the last step sent: on the device, and the host
        buffer that they are copied to, as a tensor and as an array."""
        counts, turn, size = self._counts, self._ring.turn, NUM_COUNTS * count
        return counts.device_tokens(turn, size), counts.host_tokens(turn, size), counts.host_array(turn, size)

    def body(
        self,
        shape: StepShape,
        decoder: Decoder | None = None,
        long_rows: tuple[LongRow, ...] | None = None,
        *,
        drawn_only: bool = True,
    ) -> Tensor:
        """From the packet to hidden states; those to draw from are gathered for the head. Without `drawn_only` the
        hidden states of all tokens, or of each row's last one, are computed and returned. `long_rows`: by default the
        shape's."""
        decoder = decoder or self.decoder
        layout, packet = self._writer.layout(shape), self.packet

        def part(section: Section) -> Tensor:
            return packet[section.start : section.start + section.length]

        if shape.places:
            self.place_drafts(shape)
        rows = self._rows(shape, part, long_rows)
        batch = self._gathered(shape, part, rows)
        if self._states is not None:
            batch.states = self._states.of(StateRows(rows.query_starts, part(layout.starts), rows.table_rows))
        if layout.key.last_only:
            batch.last = self._last_tokens(rows, part(layout.last_tokens))
        max_drawn = min(shape.rows if layout.key.last_only else shape.tokens, self._max_rows)
        both = slice(layout.middle - max_drawn, layout.middle + max_drawn)
        index, out = part(layout.sample_states)[both], self._draw_states[both]
        chain = self._chain
        reads_states = chain is not None and chain.reads_states
        fed = FedRows(part(layout.starts), shape.tokens_per_row if shape.kind == "decode" else 0, None)
        if chain is not None and not reads_states:
            chain.feed(batch, fed)
        if chain is not None and chain.taps:
            batch.taps = self._taps(chain.taps, shape.tokens)
        if layout.key.adapters and self._slots is not None:
            batch.adapters = self._slots.step(part(layout.slots), qkv_alone=layout.key.adapters == QKV_ALONE)
        if drawn_only and (not reads_states or batch.taps is not None):
            batch.drawn = DrawnStates(index, out)
            hidden = decoder.forward(batch, self._kv)
        else:
            hidden = decoder.forward(batch, self._kv)
            torch.index_select(hidden, 0, index, out=out)
        batch.adapters = None  # Drafters draft for the base model.
        if chain is not None and reads_states:
            states = hidden if batch.taps is None else batch.taps.out.flatten(1)
            chain.feed(batch, replace(fed, states=states))
        return out if drawn_only else hidden

    def _taps(self, layers: tuple[int, ...], num_tokens: int) -> Taps:
        shape = (num_tokens, len(layers), self.decoder.spec.hidden_size)
        out = torch.empty(shape, dtype=self.decoder.dtype, device=self.packet.device)
        return Taps(np.array(layers, np.int64), out)

    def _rows(
        self, shape: StepShape, part: Callable[[Section], Tensor], long_rows: tuple[LongRow, ...] | None
    ) -> TiledRows:
        layout = self._writer.layout(shape)
        key, has_decode_rows = layout.key, layout.key.has_decode_rows and not self._writer.tile_decode_rows
        is_listed = has_decode_rows and layout.decode_rows.length > 0
        return TiledRows(
            part(layout.query_starts),
            part(layout.seq_lens),
            self._table.block_tables,
            table_rows=part(layout.table_rows),
            tiles=part(layout.tiles).view(-1, 2) if layout.tiles.length else None,
            has_decode_rows=has_decode_rows,
            long_rows=_shape_long_rows(shape, key) if long_rows is None else long_rows,
            shared_len=part(layout.shared_len) if key.shares_prefix else None,
            decode_rows=part(layout.decode_rows).view(LIST_COLUMNS, -1) if is_listed else None,
            context_parts=key.parts,
            queries_per_row=shape.tokens_per_row,
        )

    def place_drafts(self, shape: StepShape) -> None:
        """Correct the packet by what only the device knows: where rows start, and their drafts. Part of the body of
        shapes with places; other steps call it before their body."""
        assert self._drafts is not None
        place_drafts(self._drafted(shape), self._drafts.columns)

    def proposal(self, shape: StepShape) -> Propose | None:
        """The key of the graph that drafts before the body of this shape; None if the step does not draft."""
        return Propose(shape.rows, shape.places) if self._chain is not None and shape.places > 1 else None

    def propose_drafts(self, shape: StepShape) -> Tensor:
        """Before `place_drafts`, with a drafter that is a model: it writes drafts behind the rows' known tokens."""
        assert self._drafts is not None
        assert self._chain is not None
        layout = self._writer.layout(shape)
        sections = (layout.table_rows, layout.max_drafts)
        rows, max_drafts = (self.packet[own.start : own.start + own.length] for own in sections)
        self._chain.propose(rows, max_drafts, shape.tokens_per_row - 1)
        return self._drafts.columns.history

    def accept_drafts(self, shape: StepShape) -> Tensor:
        """After all heads: keep what was drawn up to the first wrong draft. `counts` gives access to how much."""
        assert self._drafts is not None
        layout, packet = self._head_layout, self.packet
        index, start = layout.sample_index, layout.drawn_start.start
        start_of_both = packet[start : start + 1]  # both rings have entries for max_rows in a turn
        tokens = AcceptedTokens(
            index=packet[index.start : index.start + index.length],
            drawn=self._drawn.on_device,
            drawn_start=start_of_both,
            counts=self._counts.on_device,
            counts_start=start_of_both,
            last_tokens=self._table.last_tokens,
        )
        accept_drafts(self._drafted(shape), self._drafts.columns, tokens)
        return self._counts.on_device

    def _drafted(self, shape: StepShape) -> DraftedStep:
        layout = self._writer.layout(shape)

        def part(section: Section) -> Tensor:
            return self.packet[section.start : section.start + section.length]

        return DraftedStep(
            places=shape.tokens_per_row,
            table_rows=part(layout.table_rows),
            max_drafts=part(layout.max_drafts),
            starts=part(layout.starts),
            seq_lens=part(layout.seq_lens),
            tokens_in=part(layout.tokens_in),
            states=part(layout.sample_states),
            rows=part(layout.sample_rows),
            positions=part(layout.sample_positions),
            listed=part(layout.decode_rows).view(LIST_COLUMNS, -1) if layout.decode_rows.length else None,
        )

    def _gathered(self, shape: StepShape, part: Callable[[Section], Tensor], rows: TiledRows) -> ForwardBatch:
        """The model inputs, which the step's first kernels gather from the packet and the request table."""
        layout, table, size = self._writer.layout(shape), self._table, shape.tokens
        token_ids, positions, offsets = self._token_ids[:size], self._positions[:size], self._offsets[:size]
        block_ids = self._block_ids[:, :size]
        updates = Updates(
            triples=self.packet[layout.updates_start :],
            num_triples=part(layout.num_updates),
            num_records=part(layout.num_records),
            columns=self._sampler.columns,
            align=ALIGN,
        )
        embedded, angles = gather(
            tokens_in=part(layout.tokens_in),
            token_rows=part(layout.token_rows) if layout.token_rows.length else None,
            table_rows=rows.table_rows,
            starts=part(layout.starts),
            query_starts=rows.query_starts,
            last_tokens=table.last_tokens,
            tables=table.block_tables,
            updates=updates,
            block_size=self._block_size,
            looked_up=self._token_tables,
            token_ids=token_ids,
            positions=positions,
            block_ids=block_ids,
            offsets=offsets,
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            block_ids=block_ids,
            offsets=offsets,
            rows=rows,
            embedded=embedded,
            angles=None if angles is None else angles.unbind(0),
        )

    def _last_tokens(self, rows: TiledRows, index: Tensor) -> LastTokens:
        query_starts = self._row_numbers[: len(index) + 1]
        return LastTokens(index, TiledRows(query_starts, rows.seq_lens, rows.block_tables, rows.table_rows))

    def head(self, head: HeadShape) -> Tensor:
        """Draw a token from each hidden state of a group; `drawn` gives access to the tokens. Returns the logits
        [states, vocab], or [0, vocab] if the head draws without computing them."""
        layout, packet = self._head_layout, self.packet
        first = layout.middle - (head.states if head.variant == "full" else 0)

        def part(section: Section, start: int, length: int) -> Tensor:
            return packet[section.start + start :][:length]

        sections = (layout.sample_rows, layout.sample_positions, layout.sample_index)
        rows, positions, out_index = (part(section, first, head.states) for section in sections)
        out, out_start = self._drawn.on_device, part(layout.drawn_start, 0, 1)
        states = self._draw_states[first : first + head.states]
        if head.variant == "greedy" and self.decoder.draws(head.states):
            self.decoder.draw(states, DrawnTokens(rows, out, out_start, out_index, self._table.last_tokens))
            return self._logits[:0]
        logits, masks = self.decoder.logits(states, self._logits[: head.states]), None
        if head.variant == "full":
            lines, address = part(layout.mask_lines, first, head.states), part(layout.mask_address, 0, 2)
            masks = MaskLines(lines, address.view(torch.int64))
        self._sampler.draw(logits, rows, positions, out, head.variant, out_start, out_index, masks)
        return logits


def _shape_long_rows(shape: StepShape, key: ShapeKey) -> tuple[LongRow, ...]:
    return (LongRow(0, 0, shape.tokens, key.context),) if key.long_from and shape.rows == 1 else ()
