"""Reads step messages. Arrays of a decoded message are read-only views of its bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.params.rows import RowParams
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
    HEAD,
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
    StepBytesError,
    StepMessage,
    captures_from,
    draw_from,
    shape_from,
)
from millrace.plan.step import (
    ONE,
    Admission,
    Appended,
    BlockCopies,
    CapturePlan,
    DrawShape,
    ForcedDrafts,
    HeadShape,
    Int32s,
    Masks,
    PlacedTokens,
    Release,
    StateCopies,
    StepInputs,
    StepPlan,
    StepShape,
    TrainedPlaces,
)

_NONE = np.frombuffer(b"", INT32)


class StepDecoder:
    """Reads all messages of one encoder, in order. A missed message is an error, and no later one can be read: both
    sides begin anew."""

    def __init__(self) -> None:
        self._sequence = 0
        """Number of the next message."""
        self._last: StepPlan | None = None
        self._runs_at: tuple[int, bytes, StepShape, DrawShape, int] | None = None
        """Of the last repeated plan: the kind of its shape and the bytes of what it ran at; what they say."""

    def decode(self, data: bytes) -> StepMessage:
        """Raises `StepBytesError`."""
        message = self._read(data)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        if isinstance(message, StepPlan):
            self._last = message
        return message

    def _read(self, data: bytes) -> StepMessage:
        try:
            kind, _, _, sequence = HEAD.unpack_from(data)
            if sequence != self._sequence:
                raise StepBytesError(
                    f"step message {sequence} came where {self._sequence} was due: a message was missed"
                )
            reader = _Reader(data)
            if kind == REPEATED:
                message: StepMessage = self._repeated(reader)
            elif kind in _READERS:
                message = _READERS[kind](reader)
            else:
                raise StepBytesError(f"step message {sequence} has the unknown kind {kind}")
        except StepBytesError:
            raise
        except (struct.error, ValueError, IndexError) as error:
            raise StepBytesError(f"step message {self._sequence} is damaged: {error}") from error
        if reader.num_left >= ALIGNMENT:
            raise StepBytesError(f"step message {sequence} has {reader.num_left} bytes too many")
        return message

    def _repeated(self, reader: _Reader) -> StepPlan:
        last = self._last
        _, flags, shape_kind, _, step_no, num_updates, shared_blocks = reader.fields(REPEATED_HEAD)
        if last is None:
            raise StepBytesError(f"step {step_no} repeats a step that was not sent")
        shape, draw, draw_flags = self._read_runs_at(reader, shape_kind, last)
        starts = last.starts + ONE
        starts.flags.writeable = False
        block_rows, block_cols, block_ids, block_groups = _updates(reader, num_updates, flags)
        return StepPlan(
            step_no=step_no,
            rows=last.rows,
            starts=starts,
            counts=last.counts,
            samples=last.samples,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
            block_groups=block_groups,
            shape=shape,
            shared_blocks=shared_blocks,
            trained_rests=bool(flags & TRAINED_RESTS),
            masked=last.masked,
            draw=draw,
            captures=captures_from(shape if flags & CAPTURES else None, draw, draw_flags),
            epoch=last.epoch,
        )

    def _read_runs_at(self, reader: _Reader, kind: int, last: StepPlan) -> tuple[StepShape, DrawShape, int]:
        """The same records as before if the bytes are."""
        data, before = reader.bytes(RUNS_AT.size), self._runs_at
        if before is not None and before[1] == data and before[0] == kind:
            return before[2:]
        *sizes, full, greedy, draw_flags = RUNS_AT.unpack(data)
        shape, draw = shape_from(tuple(sizes), kind, last.shape), draw_from(full, greedy, draw_flags, last.draw)
        self._runs_at = kind, data, shape, draw, draw_flags
        return shape, draw, draw_flags


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def num_left(self) -> int:
        return len(self._data) - self._at

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        found = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return found

    def column(self, dtype: np.dtype[np.generic], count: int) -> npt.NDArray[Any]:
        column = np.frombuffer(self._data, dtype, count, self._at) if count else np.zeros(0, dtype)
        self._skip(column.nbytes)
        return column

    def bytes(self, count: int) -> bytes:
        if self.num_left < count:
            raise StepBytesError("a step message is cut off")
        found = self._data[self._at : self._at + count]
        self._skip(count)
        return found

    def _skip(self, count: int) -> None:
        self._at += count + -count % ALIGNMENT


def _updates(reader: _Reader, count: int, flags: int) -> tuple[Int32s, Int32s, Int32s, Int32s | None]:
    """Rows, columns, ids and groups."""
    if not count:
        return _NONE, _NONE, _NONE, _NONE if flags & HAS_GROUPS else None
    rows, cols, ids = reader.column(INT32, 3 * count).reshape(3, count)
    groups = None
    if flags & HAS_GROUPS:
        groups, rows = rows >> np.int32(GROUP_SHIFT), rows & np.int32((1 << GROUP_SHIFT) - 1)
    return rows, cols, ids, groups


def _plan(reader: _Reader) -> StepPlan:
    _, flags, shape_kind, _, step_no, epoch, draft_floor, worth, *numbers = reader.fields(PLAN_HEAD)
    num_rows, num_updates, shared_blocks, num_admitted, num_released, num_appended, *more = numbers
    num_forced, num_placed, num_states, num_loads, *sizes, full, greedy, draw_flags = more
    columns: dict[str, Any] = {name: reader.column(INT32, num_rows) for name in ("rows", "starts", "counts")}
    columns["samples"] = reader.column(BOOL, num_rows)
    names = ("block_rows", "block_cols", "block_ids", "block_groups")
    columns.update(zip(names, _updates(reader, num_updates, flags), strict=True))
    columns["draft_places"] = reader.column(INT32, num_rows) if flags & HAS_PLACES else None
    columns["trained"] = TrainedPlaces(reader.column(INT32, num_rows), worth) if flags & HAS_TRAINED else None
    for name, flag in (("masked", HAS_MASKED), ("scored", HAS_SCORED), ("pooled", HAS_POOLED)):
        columns[name] = reader.column(BOOL, num_rows) if flags & flag else None
    if num_states:
        rows, slots, positions = (reader.column(INT32, num_states) for _ in range(3))
        columns["states"] = StateCopies(rows, slots, positions, num_loads)
    shape, draw = shape_from(tuple(sizes), shape_kind), draw_from(full, greedy, draw_flags)
    return StepPlan(
        step_no=step_no,
        shape=shape,
        admitted=tuple([_admission(reader) for _ in range(num_admitted)]),
        released=tuple([_release(reader) for _ in range(num_released)]),
        appended=tuple([_appended(reader) for _ in range(num_appended)]),
        forced=tuple([_forced(reader) for _ in range(num_forced)]),
        placed=tuple([_placed(reader) for _ in range(num_placed)]),
        shared_blocks=shared_blocks,
        draft_floor=draft_floor,
        trained_rests=bool(flags & TRAINED_RESTS),
        draw=draw,
        captures=captures_from(shape if flags & CAPTURES else None, draw, draw_flags),
        epoch=epoch,
        **columns,
    )


def _admission(reader: _Reader) -> Admission:
    request_id, row, num_prompt, limit, num_computed, adapter, num_tokens, num_bytes = reader.fields(ADMISSION)
    tokens = reader.column(INT32, num_tokens)
    params = RowParams.from_bytes(reader.bytes(num_bytes))
    return Admission(row, request_id, tokens, num_prompt, params, limit, num_computed, adapter)


def _release(reader: _Reader) -> Release:
    request_id, row, reason = reader.fields(RELEASE)
    return Release(row, request_id, REASONS[reason])


def _appended(reader: _Reader) -> Appended:
    row, start, num_tokens = reader.fields(APPENDED)
    return Appended(row, start, reader.column(INT32, num_tokens))


def _forced(reader: _Reader) -> ForcedDrafts:
    row, num_tokens = reader.fields(FORCED)
    return ForcedDrafts(row, reader.column(INT32, num_tokens))


def _placed(reader: _Reader) -> PlacedTokens:
    num_sources, num_targets, source_start, target_start, count, distance = reader.fields(PLACED)
    sources, targets = reader.column(INT32, num_sources), reader.column(INT32, num_targets)
    return PlacedTokens(sources, source_start, targets, target_start, count, distance)


def _inputs(reader: _Reader) -> StepInputs:
    _, flags, _, _, step_no, num_masks, num_words, num_drafted = reader.fields(INPUTS_HEAD)
    masks = None
    if flags & HAS_MASKS:
        index = reader.column(INT64, num_masks)
        bits = reader.column(UINT32, num_masks * num_words).reshape(num_masks, num_words)
        masks = Masks(index, bits, reader.column(INT64, num_masks) if flags & HAS_MASK_PLACES else None)
    if not num_drafted:
        return StepInputs(step_no, masks)
    counts = reader.column(INT32, num_drafted)
    tokens = reader.column(INT32, int(counts.sum()))
    return StepInputs(step_no, masks, tuple(np.split(tokens, np.cumsum(counts)[:-1])))


def _copies(reader: _Reader) -> BlockCopies:
    _, source, target, _, copies_no, count = reader.fields(COPIES_HEAD)
    blocks = reader.column(INT32, count)
    return BlockCopies(copies_no, LOCATIONS[source], LOCATIONS[target], blocks, reader.column(INT32, count))


def _capture(reader: _Reader) -> CapturePlan:
    _, flags, shape_kind, _, states, variant, *sizes = reader.fields(CAPTURE_HEAD)
    if flags & IS_HEAD:
        return CapturePlan(HeadShape(states, VARIANTS[variant]))
    return CapturePlan(shape_from(tuple(sizes), shape_kind))


_READERS: dict[int, Callable[[_Reader], StepMessage]] = {
    PLAN: _plan,
    INPUTS: _inputs,
    COPIES: _copies,
    CAPTURE: _capture,
}
