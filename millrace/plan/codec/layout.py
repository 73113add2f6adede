"""The byte formats of step messages, little-endian. Fields and columns begin at multiples of 8 bytes.

Every message begins with its kind, a few flags and its sequence number.
"""

from __future__ import annotations

from operator import attrgetter
from struct import Struct
from typing import get_args

import numpy as np

from millrace.params.classes import FinishReason
from millrace.plan.step import (
    OWN_DRAW,
    BlockCopies,
    CapturePlan,
    DrawShape,
    HeadShape,
    Kind,
    Location,
    ReleaseReason,
    StepInputs,
    StepPlan,
    StepShape,
    Variant,
)

VERSION = 7
"""Of all formats in this file. A change of one of them, or of the records that they hold, increases it."""

StepMessage = StepPlan | StepInputs | BlockCopies | CapturePlan

PLAN, REPEATED, INPUTS, COPIES, CAPTURE = range(1, 6)
"""Kinds of messages. A repeated plan is one with the epoch of the plan before: only what may differ is written."""

REASONS: tuple[ReleaseReason, ...] = (*get_args(FinishReason), "preempted")
"""Reasons of releases by their codes."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)
KINDS: tuple[Kind, ...] = get_args(Kind)
LOCATIONS: tuple[Location, ...] = get_args(Location)
"""Locations by their codes: the source is in the flags of a message, the target is where a shape's kind is."""

# Flags of messages.
CAPTURES, TRAINED_RESTS, HAS_GROUPS, HAS_PLACES, HAS_TRAINED, HAS_MASKED, HAS_SCORED, HAS_POOLED = (
    1 << bit for bit in range(8)
)
HAS_MASKS, HAS_MASK_PLACES = 1, 2
IS_HEAD = 1
WAITS, CAPTURES_FULL, CAPTURES_GREEDY = 1, 2, 4
"""Flags of a draw. What is captured of a step: its shape, by a flag of the message, then its heads."""

_HEAD = "<BBBxI"
"""Kind, flags, kind of the shape, number of the sequence."""
_SHAPE = "4i"
"""Tokens, rows, places, key."""
_DRAW = "3i"
"""States of the heads that draw from logits and greedily; flags."""
HEAD = Struct(_HEAD)
PLAN_HEAD = Struct(f"{_HEAD}qqdd10i{_SHAPE}{_DRAW}4x")
"""Step, epoch, draft floor, worth of trained drafts; numbers of rows, block updates, shared blocks, admissions,
releases, records of appended, of forced and of placed tokens, copies of states, and how many of them go to rows;
shape; draw."""
REPEATED_HEAD = Struct(f"{_HEAD}qii")
"""Step, number of block updates, shared blocks. What the step runs at follows."""
RUNS_AT = Struct(f"<{_SHAPE}{_DRAW}4x")
"""Shape; draw."""
INPUTS_HEAD = Struct(f"{_HEAD}qiii4x")
"""Step, number of masks, words of each, rows with drafts."""
COPIES_HEAD = Struct(f"{_HEAD}qi4x")
"""Number of the copies, number of blocks."""
CAPTURE_HEAD = Struct(f"{_HEAD}ii{_SHAPE}")
"""States and variant of a head, or a shape."""
ADMISSION = Struct("<qiiiiiii4x")
"""Request, row, prompt tokens, limit, computed tokens, adapter; number of tokens and bytes of parameters."""
RELEASE = Struct("<qii")
"""Request, row, reason."""
APPENDED = Struct("<iii4x")
"""Row, start, number of tokens."""
FORCED = Struct("<ii")
"""Row, number of tokens."""

PLACED = Struct("<iiiiii")
"""Numbers of source and target blocks, offsets of the first token in both, number of tokens, distance."""

ALIGNMENT = 8
GROUP_SHIFT = 24
"""A block update's group is in the upper bits of its row: there are fewer than 2**24 rows and 128 groups."""

INT32, INT64, UINT32, BOOL = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<u4"), np.dtype("?")


class StepBytesError(ValueError):
    """Bytes that are no step message, or not the next one."""


_KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
sizes_of_shape = attrgetter("tokens", "rows", "places", "key")
_HEAD_FLAGS: dict[Variant, int] = {"greedy": CAPTURES_GREEDY, "full": CAPTURES_FULL}


def kind_of_shape(shape: StepShape) -> int:
    return _KIND_CODES[shape.kind]


def draw_of(plan: StepPlan) -> tuple[int, int, int]:
    draw = plan.draw
    flags = WAITS if draw.waits else 0
    for part in plan.captures:
        if isinstance(part, HeadShape):
            flags |= _HEAD_FLAGS[part.variant]
    return draw.full, draw.greedy, flags


def draw_from(full: int, greedy: int, flags: int, last: DrawShape = OWN_DRAW) -> DrawShape:
    """`last`: that of the step before, returned if it is the same."""
    waits = bool(flags & WAITS)
    if last.full == full and last.greedy == greedy and last.waits == waits:
        return last
    return DrawShape(full, greedy, waits)


def captures_from(shape: StepShape | None, draw: DrawShape, flags: int) -> tuple[StepShape | HeadShape, ...]:
    """`shape`: if its graph is captured. `flags`: of the draw."""
    body = () if shape is None else (shape,)
    if flags <= WAITS:
        return body
    return (*body, *(head for head in draw.heads if flags & _HEAD_FLAGS[head.variant]))


def shape_from(sizes: tuple[int, ...], kind: int, last: StepShape | None = None) -> StepShape:
    """`last`: that of the step before, returned if it is the same."""
    if last is not None and sizes_of_shape(last) == sizes and kind_of_shape(last) == kind:
        return last
    return StepShape(KINDS[kind], *sizes)
