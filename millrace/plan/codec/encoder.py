"""Writes step messages. Messages of one encoder form a sequence, which one decoder reads from its beginning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millrace.plan.codec.layout import (
    ADMISSION,
    ALIGNMENT,
    APPENDED,
    BOOL,
    CAPTURE,
    CAPTURE_HEAD,
    CAPTURES,
    COPIES,
    COPIES_HEAD,
    FORCED,
    GROUP_SHIFT,
    HAS_GROUPS,
    HAS_MASK_PLACES,
    HAS_MASKED,
    HAS_MASKS,
    HAS_PLACES,
    HAS_POOLED,
    HAS_SCORED,
    HAS_TRAINED,
    INPUTS,
    INPUTS_HEAD,
    INT32,
    INT64,
    IS_HEAD,
    LOCATIONS,
    PLACED,
    PLAN,
    PLAN_HEAD,
    REASONS,
    RELEASE,
    REPEATED,
    REPEATED_HEAD,
    RUNS_AT,
    TRAINED_RESTS,
    UINT32,
    VARIANTS,
    draw_of,
    kind_of_shape,
    sizes_of_shape,
)
from millrace.plan.step import (
    NO_EPOCH,
    Admission,
    BlockCopies,
    CapturePlan,
    DrawShape,
    HeadShape,
    StepInputs,
    StepPlan,
    StepShape,
)

_REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}


class StepEncoder:
    def __init__(self) -> None:
        self._sequence = 0
        """Number of the next message."""
        self._epoch = NO_EPOCH
        """Of the last plan."""
        self._runs_at: tuple[StepShape, DrawShape, int, bytes] | None = None
        """Shape and draw of the last repeated plan that captured nothing; code of the kind, and the bytes of both."""

    def plan(self, plan: StepPlan) -> bytes:
        is_repeated = plan.repeats(self._epoch) and _only_advances(plan)
        self._epoch = plan.epoch
        return self._repeated(plan) if is_repeated else encode_plan(plan, self._next())

    def inputs(self, inputs: StepInputs) -> bytes:
        return encode_inputs(inputs, self._next())

    def copies(self, copies: BlockCopies) -> bytes:
        source, target = LOCATIONS.index(copies.source), LOCATIONS.index(copies.target)
        head = COPIES_HEAD.pack(COPIES, source, target, self._next(), copies.copies_no, len(copies.blocks))
        return _joined([head, _column(copies.blocks, INT32), _column(copies.slots, INT32)])

    def capture(self, capture: CapturePlan) -> bytes:
        shape, sequence = capture.shape, self._next()
        if isinstance(shape, HeadShape):
            head = (CAPTURE, IS_HEAD, 0, sequence, shape.states, VARIANTS.index(shape.variant))
            return CAPTURE_HEAD.pack(*head, *(0,) * 4)
        return CAPTURE_HEAD.pack(CAPTURE, 0, kind_of_shape(shape), sequence, 0, 0, *sizes_of_shape(shape))

    def _repeated(self, plan: StepPlan) -> bytes:
        """Rows, counts, samples and masked are those of the plan before, and each row starts one token later."""
        last, shape, captures = self._runs_at, plan.shape, plan.captures
        if last is not None and shape is last[0] and plan.draw is last[1] and not captures:
            kind, runs_at = last[2:]
        else:
            kind, runs_at = kind_of_shape(shape), RUNS_AT.pack(*sizes_of_shape(shape), *draw_of(plan))
            self._runs_at = None if captures else (shape, plan.draw, kind, runs_at)
        flags, num_updates, sequence = TRAINED_RESTS if plan.trained_rests else 0, len(plan.block_ids), self._sequence
        if captures and shape in captures:
            flags |= CAPTURES
        if plan.block_groups is not None:
            flags |= HAS_GROUPS
        self._sequence = (sequence + 1) & 0xFFFFFFFF
        head = REPEATED_HEAD.pack(REPEATED, flags, kind, sequence, plan.step_no, num_updates, plan.shared_blocks)
        return head + runs_at + _updates(plan) if num_updates else head + runs_at

    def _next(self) -> int:
        sequence = self._sequence
        self._sequence = (sequence + 1) & 0xFFFFFFFF
        return sequence


def _only_advances(plan: StepPlan) -> bool:
    """True for plans that a repeated one can hold, given that their epoch is that of the plan before."""
    has_records = plan.admitted or plan.released or plan.appended or plan.forced or plan.placed
    has_columns = plan.draft_places is not None or plan.scored is not None or plan.pooled is not None
    has_copies = plan.states is not None
    return not (has_records or has_columns or has_copies or plan.trained is not None or plan.draft_floor)


def encode_plan(plan: StepPlan, sequence: int = 0) -> bytes:
    """All of a plan, whatever the one before was."""
    trained, shape, states = plan.trained, plan.shape, plan.states
    flags = (
        (CAPTURES if plan.shape in plan.captures else 0)
        | (TRAINED_RESTS if plan.trained_rests else 0)
        | (HAS_GROUPS if plan.block_groups is not None else 0)
        | (HAS_PLACES if plan.draft_places is not None else 0)
        | (HAS_TRAINED if trained is not None else 0)
        | (HAS_MASKED if plan.masked is not None else 0)
        | (HAS_SCORED if plan.scored is not None else 0)
        | (HAS_POOLED if plan.pooled is not None else 0)
    )
    head = PLAN_HEAD.pack(
        PLAN,
        flags,
        kind_of_shape(shape),
        sequence,
        plan.step_no,
        plan.epoch,
        plan.draft_floor,
        0.0 if trained is None else trained.worth,
        len(plan.rows),
        len(plan.block_ids),
        plan.shared_blocks,
        len(plan.admitted),
        len(plan.released),
        len(plan.appended),
        len(plan.forced),
        len(plan.placed),
        0 if states is None else len(states.rows),
        0 if states is None else states.num_loads,
        *sizes_of_shape(shape),
        *draw_of(plan),
    )
    parts = [head, *(_column(column, INT32) for column in (plan.rows, plan.starts, plan.counts))]
    parts += [_column(plan.samples, BOOL), _updates(plan)]
    if plan.draft_places is not None:
        parts.append(_column(plan.draft_places, INT32))
    if trained is not None:
        parts.append(_column(trained.places, INT32))
    parts += [_column(column, BOOL) for column in (plan.masked, plan.scored, plan.pooled) if column is not None]
    if states is not None:
        parts += [_column(column, INT32) for column in (states.rows, states.slots, states.positions)]
    for admission in plan.admitted:
        parts += _admission(admission)
    parts += [RELEASE.pack(one.request_id, one.row, _REASON_CODES[one.reason]) for one in plan.released]
    for appended in plan.appended:
        parts.append(APPENDED.pack(appended.row, appended.start, len(appended.tokens)))
        parts.append(_column(appended.tokens, INT32))
    for forced in plan.forced:
        parts += [FORCED.pack(forced.row, len(forced.tokens)), _column(forced.tokens, INT32)]
    for placed in plan.placed:
        numbers = (len(placed.sources), len(placed.targets), placed.source_start, placed.target_start)
        parts.append(PLACED.pack(*numbers, placed.count, placed.distance))
        parts += [_column(placed.sources, INT32), _column(placed.targets, INT32)]
    return _joined(parts)


def encode_inputs(inputs: StepInputs, sequence: int = 0) -> bytes:
    masks, drafts = inputs.masks, inputs.drafts
    flags = num_masks = num_words = 0
    parts: list[bytes] = []
    if masks is not None:
        flags, (num_masks, num_words) = HAS_MASKS, masks.bits.shape
        parts += [_column(masks.index, INT64), _column(masks.bits, UINT32)]
        if masks.places is not None:
            flags |= HAS_MASK_PLACES
            parts.append(_column(masks.places, INT64))
    if drafts:
        parts.append(_column(np.array([len(own) for own in drafts]), INT32))
        parts.append(_column(np.concatenate(drafts), INT32))
    head = INPUTS_HEAD.pack(INPUTS, flags, 0, sequence, inputs.step_no, num_masks, num_words, len(drafts))
    return _joined([head, *parts])


def _updates(plan: StepPlan) -> bytes:
    """Twelve bytes for each block update."""
    rows = plan.block_rows
    if plan.block_groups is not None:
        rows = rows | plan.block_groups << np.int32(GROUP_SHIFT)
    return b"".join((rows.tobytes(), plan.block_cols.tobytes(), plan.block_ids.tobytes()))


def _admission(admission: Admission) -> tuple[bytes, bytes, bytes]:
    params = admission.row_params.to_bytes()
    head = ADMISSION.pack(
        admission.request_id,
        admission.row,
        admission.num_prompt,
        admission.limit,
        admission.num_computed,
        admission.adapter,
        len(admission.tokens),
        len(params),
    )
    return head, _column(admission.tokens, INT32), params


def _column(column: npt.NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    return column.astype(dtype, copy=False).tobytes()


def _joined(parts: list[bytes]) -> bytes:
    """Each part padded to the alignment."""
    return b"".join([part + bytes(-len(part) % ALIGNMENT) if len(part) % ALIGNMENT else part for part in parts])
