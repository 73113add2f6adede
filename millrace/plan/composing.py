"""Composes plans: turns the rows chosen for a step into a `StepPlan` and counts their progress as launched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from millrace.plan.in_flight import StepsInFlight
from millrace.plan.planner.protocol import ChosenRows, Forced
from millrace.plan.rows.repeated_decode import RepeatedDecode, repeated_decode_from
from millrace.plan.seating import Seating
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.shapes.declared import StepSizes
from millrace.plan.shapes.heads import DueRows
from millrace.plan.step import (
    ONE,
    OWN_DRAW,
    Admission,
    Bools,
    DrawShape,
    ForcedDrafts,
    HeadShape,
    Int32s,
    Int64s,
    PlacedTokens,
    StateCopies,
    StepPlan,
    StepShape,
    TrainedPlaces,
)

NO_HEADS: tuple[HeadShape, ...] = ()


class Composer:
    def __init__(self, seating: Seating, in_flight: StepsInFlight, shapes: ShapeChoice) -> None:
        self._seating, self._rows, self._in_flight, self._shapes = seating, seating.rows, in_flight, shapes
        self._has_groups = seating.groups.num_groups > 1
        self._repeated: RepeatedDecode | None = None
        self._epoch = 0
        """Of the last plan."""

    def repeats(self) -> bool:
        """True if the next plan may decode exactly the rows of the last one."""
        return self._repeated is not None and self._repeated.can_repeat(self._rows)

    def forget(self) -> None:
        """The last plan cannot be repeated: its step was discarded."""
        self._repeated = None

    def compose(self, chosen: ChosenRows, forced: Forced) -> StepPlan:
        """The plan of these rows. `forced`: used by rows that have places and draw under a grammar."""
        repeated, rows = self._repeated, self._rows
        is_plain = not chosen.chunks and chosen.drafts is None  # Rows decode one token each and have no places.
        is_same = is_plain and repeated is not None and len(chosen.singles) == len(repeated.order)
        if is_same and repeated is not None and repeated.can_repeat(rows):
            return self._repeat(repeated, chosen.trained_rests)
        table_rows, counts = _columns(chosen.singles, chosen.chunks)
        starts, samples, has_silent = self._advance(table_rows, counts)
        if chosen.drafts is not None:
            rows.slack[chosen.singles] += chosen.drafts
        drafts, trained = _with_chunks(chosen.drafts, chosen.trained, len(chosen.chunks))
        masked = self._masked(table_rows, samples)
        admitted = self._admissions(chosen)
        shared_blocks = self._seating.shared_blocks(int(table_rows[0])) if is_plain else 0
        scored, pooled = self._scored(table_rows, starts), self._pooled(table_rows)
        shape, is_captured = self._shapes.choose(
            StepSizes(
                starts=starts,
                counts=counts,
                longest=chosen.longest,
                num_singles=len(chosen.singles),
                shared_blocks=shared_blocks,
                drafts=drafts,
                all_draw=(not chosen.chunks and not has_silent) or bool(samples.all()),
                scores_prompts=scored is not None or has_silent,
                adapters=int(rows.adapted[table_rows].max()) if rows.num_adapted else 0,
            )
        )
        draw, heads = OWN_DRAW, NO_HEADS
        if self._shapes.has_heads:
            is_bare = drafts is None and scored is None and pooled is None
            due = self._due(table_rows, starts + counts, samples, masked, is_bare=is_bare)
            draw, heads = self._shapes.heads(due, shape)
        self._epoch += 1
        states = self._states(admitted, table_rows, starts + counts) if self._seating.checkpoints is not None else None
        block_groups, block_rows, block_cols, block_ids = self._seating.take_new_blocks()
        plan = StepPlan(
            step_no=self._in_flight.next_step,
            rows=table_rows.astype(np.int32),
            starts=starts,
            counts=counts,
            samples=samples,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
            shape=shape,
            admitted=admitted,
            released=self._seating.take_releases(),
            appended=self._seating.take_appended(),
            shared_blocks=shared_blocks,
            block_groups=block_groups if self._has_groups else None,
            draft_places=drafts,
            draft_floor=chosen.draft_floor,
            trained=trained,
            trained_rests=chosen.trained_rests,
            forced=self._forced(table_rows, drafts, masked, forced) if forced else (),
            masked=masked,
            scored=scored,
            pooled=pooled,
            states=states,
            placed=self._placed(admitted),
            draw=draw,
            captures=(shape, *heads) if is_captured else heads,
            epoch=self._epoch,
        )
        self._in_flight.launch(plan)
        self._repeated = repeated_decode_from(plan, len(chosen.singles), rows)
        return plan

    def _advance(self, table_rows: Int64s, counts: Int32s) -> tuple[Int32s, Bools, bool]:
        """Count the rows' tokens as computed. Returns their starts, which draw, and if some never do."""
        rows = self._rows
        starts, known = rows.computed[table_rows], rows.known[table_rows]
        ends = starts + counts
        rows.computed[table_rows] = ends
        samples: Bools = ends == known
        has_silent = rows.num_silent > 0 and bool(rows.silent[table_rows].any())
        if has_silent:
            samples &= ~rows.silent[table_rows]
        if self._seating.documents:
            self._seating.documents.leap(table_rows.tolist())
        # The token that this step draws counts as known from here on, although only the device will have it.
        rows.known[table_rows] = known + samples
        return starts, samples, has_silent

    def _due(
        self, table_rows: Int64s, ends: Int32s, samples: Bools, masked: Bools | None, *, is_bare: bool = True
    ) -> DueRows:
        """The rows that draw, for the choice of heads. `ends`: positions of the tokens that they draw. `is_bare`: no
        row has places, or gets anything for its prompt."""
        rows, shapes = self._rows, self._shapes
        if masked is None and rows.all_draw_alike:
            num_due = int(np.count_nonzero(samples))
            return DueRows(num_due, num_due if rows.num_from_logits else 0)
        due = table_rows[samples]
        from_logits = ends[samples] < rows.logits_until[due]
        can_wait = False
        if masked is not None:
            from_logits |= masked[samples]
            can_wait = is_bare and len(self._in_flight) > 0 and shapes.can_wait(len(table_rows))
            can_wait = can_wait and not (rows.num_beyond_head and bool(rows.beyond_head[due].any()))
        return DueRows(len(due), int(np.count_nonzero(from_logits)), can_wait)

    def _draw_again(
        self, repeated: RepeatedDecode, ends: Int32s, shape: StepShape
    ) -> tuple[DrawShape, tuple[HeadShape, ...]]:
        """The heads of a step that repeats the one before."""
        if not self._shapes.has_heads:
            return OWN_DRAW, NO_HEADS
        due, before = repeated.due, repeated.plan
        if due is None:
            due = self._due(repeated.order, ends, before.samples, before.masked)
            if before.masked is None and not self._rows.num_with_minimum:
                repeated.due = due  # The same rows, and each is drawn as before.
        return self._shapes.heads(due, shape)

    def _states(self, admitted: tuple[Admission, ...], table_rows: Int64s, ends: Int32s) -> StateCopies | None:
        checkpoints, rows = self._seating.checkpoints, self._rows
        assert checkpoints is not None
        inside = ends < rows.known_host[table_rows]  # A row that draws has left its prompt behind.
        pairs = zip(table_rows[inside].tolist(), ends[inside].tolist(), strict=True) if inside.any() else ()
        if not admitted and not pairs:
            return None
        return checkpoints.take(self._in_flight.next_step, [one.row for one in admitted], pairs)

    def _forced(
        self, table_rows: Int64s, places: Int32s | None, masked: Bools | None, forced: Forced
    ) -> tuple[ForcedDrafts, ...]:
        if places is None or masked is None:
            return ()
        due = table_rows[masked & (places > 0)]
        found = zip(due.tolist(), self._rows.request_ids[due].tolist(), strict=True)
        return tuple(ForcedDrafts(row, np.array(tokens, np.int32)) for row, one in found if (tokens := forced.get(one)))

    def _repeat(self, repeated: RepeatedDecode, trained_rests: bool) -> StepPlan:
        """What `compose` would return for the same rows, reusing the columns of the previous plan."""
        rows, order, before = self._rows, repeated.order, repeated.plan
        starts = before.starts + ONE
        ends = starts + ONE
        rows.computed[order] = ends
        rows.known[order] = ends + ONE
        shared_blocks = self._seating.shared_blocks(int(order[0]))
        shape, is_captured = self._shapes.repeat(before.shape, len(order), shared_blocks)
        draw, heads = self._draw_again(repeated, ends, shape)
        block_groups, block_rows, block_cols, block_ids = self._seating.take_new_blocks()
        plan = StepPlan(
            step_no=self._in_flight.next_step,
            rows=before.rows,
            starts=starts,
            counts=before.counts,
            samples=before.samples,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
            shape=shape,
            shared_blocks=shared_blocks,
            block_groups=block_groups if self._has_groups else None,
            trained_rests=trained_rests,
            masked=before.masked,
            draw=draw,
            captures=(shape, *heads) if is_captured else heads,
            epoch=self._epoch,
        )
        self._in_flight.launch(plan)
        repeated.advance(plan)
        return plan

    @property
    def repeated(self) -> RepeatedDecode | None:
        """What further plans can repeat of the last one."""
        return self._repeated if self.repeats() else None

    def repeat_many(self, repeated: RepeatedDecode, count: int) -> StepPlan:
        """The last of `count` plans that repeat the one before, as if each had been made. The rows have the blocks."""
        rows, order, before = self._rows, repeated.order, repeated.plan
        starts = before.starts + np.int32(count)
        ends = starts + ONE
        rows.computed[order] = ends
        rows.known[order] = ends + ONE
        shared_blocks = self._seating.shared_blocks(int(order[0]))
        shape, is_captured = self._shapes.repeat(before.shape, len(order), shared_blocks)
        draw, heads = self._draw_again(repeated, ends, shape)
        block_groups, block_rows, block_cols, block_ids = self._seating.take_new_blocks()
        plan = replace(
            before,
            step_no=self._in_flight.next_step + count - 1,
            starts=starts,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
            block_groups=block_groups if self._has_groups else None,
            shape=shape,
            draw=draw,
            captures=(shape, *heads) if is_captured else heads,
            shared_blocks=shared_blocks,
            admitted=(),
            released=(),
            appended=(),
            epoch=self._epoch,
        )
        self._in_flight.skip(plan, count)
        repeated.advance(plan, count)
        return plan

    def _admissions(self, chosen: ChosenRows) -> tuple[Admission, ...]:
        if not self._seating.has_unannounced:
            return ()
        return self._seating.take_admissions(chosen.chunks, chosen.singles)

    def _placed(self, admitted: tuple[Admission, ...]) -> tuple[PlacedTokens, ...]:
        documents = self._seating.documents
        return documents.take([one.row for one in admitted]) if documents and admitted else ()

    def _masked(self, table_rows: Int64s, samples: Bools) -> Bools | None:
        if not self._rows.num_constrained:
            return None
        masked: Bools = self._rows.constrained[table_rows] & samples
        return masked if masked.any() else None

    def _pooled(self, table_rows: Int64s) -> Bools | None:
        if not self._rows.num_pooled:
            return None
        pooled: Bools = self._rows.pooled[table_rows]
        return pooled if pooled.any() else None

    def _scored(self, table_rows: Int64s, starts: Int32s) -> Bools | None:
        rows = self._rows
        if not rows.num_scored:
            return None
        # The last prompt token scores nothing: what follows it is drawn.
        scored: Bools = rows.scored[table_rows] & (starts < rows.num_prompt[table_rows] - 1)
        return scored if scored.any() else None


def _with_chunks(
    drafts: Int32s | None, trained: TrainedPlaces | None, num_chunks: int
) -> tuple[Int32s | None, TrainedPlaces | None]:
    """Columns over the rows with one token as columns over all rows of a step."""
    if drafts is None or not num_chunks:
        return drafts, trained
    none = np.zeros(num_chunks, np.int32)
    if trained is not None:
        trained = TrainedPlaces(np.concatenate([trained.places, none]), trained.worth)
    return np.concatenate([drafts, none]), trained


def _columns(singles: Int64s, chunks: dict[int, int]) -> tuple[Int64s, Int32s]:
    """The rows of a step and the number of tokens of each."""
    if not chunks:
        return singles, np.ones(len(singles), np.int32)
    rows, counts = np.array(list(chunks), np.int64), np.array(list(chunks.values()), np.int32)
    if not len(singles):
        return rows, counts
    return np.concatenate([singles, rows]), np.concatenate([np.ones(len(singles), np.int32), counts])
