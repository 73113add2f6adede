"""Places cached documents in rows: a document that was computed alone, at the beginning of a prompt, is used elsewhere.

A row's tokens are computed in order, but spans inside its documents are skipped: `computed` leaps over them. Their keys
and values are copied from the blocks of the document alone, with keys rotated to their new positions. The first tokens
of each document are computed in their place, and so is what its blocks do not cover. All that follows the first skipped
token is approximate and is never registered in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from millrace.plan.in_flight import StepsInFlight
from millrace.plan.kv.block_pool import BlockPool
from millrace.plan.kv.prefix import Match, PrefixIndex
from millrace.plan.request import Request
from millrace.plan.rows.rows import Rows
from millrace.plan.step import PlacedTokens

NOT_LAUNCHED = -1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a row that are not computed."""

    start: int
    end: int
    document_start: int
    blocks: tuple[int, ...]
    """All blocks of the document alone that are cached, from its first token on."""


@dataclass(slots=True)
class _Row:
    spans: list[Span]
    """Those that `computed` has not passed."""
    placed: list[Span]
    """All of them."""
    step: int = NOT_LAUNCHED
    """The step that copies them. Until then the row has references to the documents' blocks."""


class PlacedDocuments:
    def __init__(self, rows: Rows, pool: BlockPool, prefix: PrefixIndex, in_flight: StepsInFlight) -> None:
        self._rows, self._pool, self._prefix, self._in_flight = rows, pool, prefix, in_flight
        self._block_size = rows.block_size
        self._of: dict[int, _Row] = {}

    def __bool__(self) -> bool:
        """True if some row has documents."""
        return bool(self._of)

    def must_wait(self, request: Request) -> bool:
        """True if a running request is computing a block of one of its documents."""
        if request.documents is None or not request.read_cache:
            return False
        for span in request.documents.spans:
            num_full = (span.end - span.start) // self._block_size
            found = self._prefix.blocks_of_text(request, span.start, num_full)
            if len(found) < num_full and self._prefix.awaits_text(request, span.start, len(found)):
                return True
        return False

    def find(self, request: Request, match: Match) -> list[Span]:
        """Spans that need not be computed, after the prefix that was found."""
        if request.documents is None or not request.read_cache:
            return []
        spans, size = [], self._block_size
        reached, last = match.num_columns * size, request.num_prompt - 1  # At least one token is left to compute.
        for asked in request.documents.spans:
            start = asked.start
            blocks = self._prefix.blocks_of_text(request, start, (asked.end - start) // size)
            first, until = max(asked.first, reached), min(start + len(blocks) * size, last)
            if until - first >= size:  # Fewer are not worth a step of their own.
                spans.append(Span(first, until, start, tuple(blocks)))
        return spans

    def seat(self, row: int, spans: list[Span]) -> None:
        """The row has blocks for all its spans."""
        for span in spans:
            self._pool.share(span.blocks)
        self._of[row] = _Row(list(spans), spans)
        self._leap(row)

    def most(self, row: int, count: int) -> int:
        """How many of the row's next `count` tokens can be computed together: those before its next span."""
        own = self._of.get(row)
        return count if own is None or not own.spans else min(count, own.spans[0].start - int(self._rows.computed[row]))

    def leap(self, rows: Iterable[int]) -> None:
        """These rows have advanced."""
        for row in rows:
            if row in self._of:
                self._leap(row)

    def _leap(self, row: int) -> None:
        own, computed = self._of[row], self._rows.computed
        while own.spans and own.spans[0].start <= computed[row]:
            computed[row] = max(int(computed[row]), own.spans.pop(0).end)

    def take(self, rows: Iterable[int]) -> tuple[PlacedTokens, ...]:
        """The copies that the next step begins with: those of rows that it announces."""
        placed = []
        for row in rows:
            own = self._of.get(row)
            if own is None or own.step != NOT_LAUNCHED:
                continue
            own.step = self._in_flight.next_step
            placed += [self._placed(row, span) for span in own.placed]
            self._release(own, own.step)
        return tuple(placed)

    def _placed(self, row: int, span: Span) -> PlacedTokens:
        size, distance = self._block_size, span.document_start
        first, end = span.start - distance, span.end - distance
        column = span.start // size
        return PlacedTokens(
            sources=np.array(span.blocks[first // size : -(-end // size)], np.int32),
            source_start=first % size,
            targets=np.array(self._rows.blocks[row][0][column : -(-span.end // size)], np.int32),
            target_start=span.start % size,
            count=span.end - span.start,
            distance=distance,
        )

    def leave(self, row: int) -> None:
        own = self._of.pop(row, None)
        if own is not None and own.step == NOT_LAUNCHED:
            self._release(own, self._in_flight.fence)

    def rewind(self, first_lost: int) -> None:
        """The steps from this one on are discarded, and `computed` is what was confirmed. What they copied is lost:
        those rows compute all their tokens."""
        for row, own in self._of.items():
            if own.step >= first_lost:
                own.spans = own.placed = []
            else:
                own.spans = list(own.placed)
                self._leap(row)

    def _release(self, own: _Row, fence: int | None) -> None:
        for span in own.placed:
            self._pool.release(reversed(span.blocks), fence)
