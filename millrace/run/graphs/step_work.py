"""What a step does on a GPU, for each size that it may be padded to.

It has two parts. The body turns the packet into hidden states of the rows that draw; the head turns those into tokens.
Both read and write buffers that never move, so that either can be captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.models.batch import DrawnStates, ForwardBatch, LastTokens
from millrace.models.decoder import Decoder
from millrace.ops.attention.long_rows import LongRow
from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.triton.sampling import ROW_WORDS
from millrace.ops.triton.step_inputs import Updates, gather
from millrace.plan.step import Int32s, StepPlan
from millrace.run.packet.decode_rows import COLUMNS, num_words
from millrace.run.packet.lookup_tables import token_tables
from millrace.run.packet.packet_ring import DrawnRing, PacketRing
from millrace.run.packet.step_packet import ALIGN, Bucket, PacketWriter, Section
from millrace.run.sampling.device_sampler import DeviceSampler, Variant
from millrace.run.table.request_table import RequestTable

UPDATES_IN_PACKET = 1 << 15
"""Changes of block tables that one packet has room for."""


class StepWork:
    def __init__(
        self,
        decoder: Decoder,
        kv: list[Tensor],
        table: RequestTable,
        sampler: DeviceSampler,
        writer: PacketWriter,
        *,
        smallest: Bucket,
        block_size: int,
        max_rows: int,
        max_context: int,
        most_tokens: int,
        tile_singles: bool,
    ) -> None:
        """`smallest` is a bucket with a place for everything that the head reads."""
        place, spec = kv[0].device, decoder.spec
        self.decoder, self.smallest = decoder, smallest
        self._kv, self._table, self._sampler, self._writer = kv, table, sampler, writer
        self._block_size, self._max_rows, self._tile_singles = block_size, max_rows, tile_singles
        words = 4 * max_rows + 8 * (max_rows + 32) + num_words(max_rows + 1)
        words += 6 * most_tokens + 3 * UPDATES_IN_PACKET + 512
        self._ring = PacketRing(words + max_rows * ROW_WORDS, place)
        self._packet = self._ring.on_device
        self._token_ids = torch.zeros(most_tokens, dtype=torch.int64, device=place)
        self._positions = torch.zeros_like(self._token_ids)
        self._slots = torch.zeros_like(self._token_ids)
        self._block_ids, self._offsets = torch.zeros_like(self._token_ids), torch.zeros_like(self._token_ids)
        # Padding takes as many positions as it has tokens.
        self._looked_up = token_tables(decoder, max(max_context, most_tokens))
        self._sampled = torch.zeros((max_rows, spec.hidden_size), dtype=decoder.dtype, device=place)
        self._logits = torch.empty((max_rows, spec.vocab_size), dtype=torch.float32, device=place)
        self._drawn = DrawnRing(max_rows, place)
        self._count = torch.arange(max_rows + 2, dtype=torch.int32, device=place)

    def send(self, plan: StepPlan | None, bucket: Bucket, records: Int32s | None = None) -> None:
        """What the step is made of; without a plan, of padding alone."""
        packet, drawn_start = self._ring.next(), self._drawn.start(self._ring.turn)
        self._ring.send(self._writer.write(plan, self._table, bucket, packet, records, drawn_start))

    def drawn(self, count: int) -> Tensor:
        """The first `count` tokens that the step sent last draws."""
        return self._drawn.line(self._ring.turn, count)

    def drawn_here(self, count: int) -> tuple[Tensor, Int32s]:
        """Where these are copied to on the host, as a tensor and as an array."""
        turn = self._ring.turn
        return self._drawn.host_line(turn, count), self._drawn.host_view(turn, count)

    def body(
        self,
        bucket: Bucket,
        decoder: Decoder | None = None,
        long_rows: tuple[LongRow, ...] | None = None,
        *,
        drawn_only: bool = True,
    ) -> Tensor:
        """From the packet to hidden states: those that precede a draw, gathered for the head. Unless these are all that
        is wanted, those of all tokens, or of each row's last, are returned. Where no `long_rows` are named, they are
        the bucket's own."""
        decoder = decoder or self.decoder
        layout, packet = self._writer.layout(bucket), self._packet

        def part(section: Section) -> Tensor:
            return packet[section.start : section.start + section.length]

        batch = self._gathered(bucket, part)
        batch.tiles = part(layout.tiles).view(-1, 2) if bucket.tiles else None
        batch.has_singles = bucket.has_singles and not self._tile_singles
        batch.long_rows = _own_long_rows(bucket) if long_rows is None else long_rows
        batch.context_parts = bucket.parts
        batch.shared_len = part(layout.shared_len) if bucket.shares else None
        if batch.has_singles and layout.singles.length:
            batch.singles = part(layout.singles).view(COLUMNS, -1)
        if bucket.last_only:
            batch.last = self._last_tokens(batch, part(layout.last_tokens))
        most = min(bucket.rows if bucket.last_only else bucket.tokens, self._max_rows)
        index, out = part(layout.sample_states)[:most], self._sampled[:most]
        if drawn_only:
            batch.drawn = DrawnStates(index, out)
            return decoder.forward(batch, self._kv)
        hidden = decoder.forward(batch, self._kv)
        torch.index_select(hidden, 0, index, out=out)
        return hidden

    def _gathered(self, bucket: Bucket, part: Callable[[Section], Tensor]) -> ForwardBatch:
        """The step's inputs, made by the packet's first kernels."""
        layout, table, size = self._writer.layout(bucket), self._table, bucket.tokens
        query_starts, table_rows = part(layout.query_starts), part(layout.table_rows)
        columns = (self._token_ids, self._positions, self._slots, self._block_ids, self._offsets)
        token_ids, positions, slots, block_ids, offsets = (column[:size] for column in columns)
        updates = Updates(
            triples=self._packet[layout.updates_start :],
            num_triples=part(layout.num_updates),
            num_records=part(layout.num_records),
            columns=self._sampler.columns,
            align=ALIGN,
        )
        embedded, angles = gather(
            tokens_in=part(layout.tokens_in),
            token_rows=None if bucket.is_decode else part(layout.token_rows),
            table_rows=table_rows,
            starts=part(layout.starts),
            query_starts=query_starts,
            last_tokens=table.last_tokens,
            tables=table.block_tables,
            updates=updates,
            block_size=self._block_size,
            looked_up=self._looked_up,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_ids=block_ids,
            offsets=offsets,
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            seq_lens=part(layout.seq_lens),
            block_tables=table.block_tables,
            max_query_len=0,
            max_seq_len=0,
            query_starts_host=[],
            seq_lens_host=[],
            table_rows=table_rows,
            places=(block_ids, offsets),
            embedded=embedded,
            angles=None if angles is None else angles.unbind(0),
        )

    def _last_tokens(self, batch: ForwardBatch, index: Tensor) -> LastTokens:
        return LastTokens(
            index=index,
            query_starts=self._count[: len(index) + 1],
            seq_lens=batch.seq_lens,
            block_tables=batch.block_tables,
            query_starts_host=[],
            seq_lens_host=[],
            table_rows=batch.table_rows,
        )

    def head(self, size: int, variant: Variant) -> Tensor:
        """Logits [size, vocab] of the gathered rows, or none of them where tokens are found without; what was drawn is
        where `drawn` finds it."""
        layout = self._writer.layout(self.smallest)
        rows = self._packet[layout.sample_rows.start :][:size]
        positions = self._packet[layout.sample_positions.start :][:size]
        drawn_start = self._packet[layout.drawn_start.start :][:1]
        if variant == "greedy" and self.decoder.draws(size):
            to = DrawnTokens(rows, self._drawn.on_device, drawn_start, self._table.last_tokens)
            self.decoder.draw(self._sampled[:size], to)
            return self._logits[:0]
        logits = self.decoder.logits(self._sampled[:size], self._logits[:size])
        self._sampler.draw(logits, rows, positions, self._drawn.on_device, variant, drawn_start)
        return logits

    def whole(self, bucket: Bucket, variant: Variant) -> Tensor:
        """A step in which every row draws: what `head` returns."""
        self.body(bucket)
        return self.head(bucket.rows, variant)


def _own_long_rows(bucket: Bucket) -> tuple[LongRow, ...]:
    return (LongRow(0, 0, bucket.tokens, bucket.context),) if bucket.long_from and bucket.rows == 1 else ()
