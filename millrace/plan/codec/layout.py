"""The byte formats of step messages, little-endian. Fields and columns begin at multiples of 8 bytes.

Every message begins with its kind, a few flags and its sequence number.
"""

from __future__ import annotations

from operator import attrgetter
from struct import Struct
from typing import Any, get_args

import numpy as np

from millrace.params import FinishReason
from millrace.plan.step import (
    BlockCopies,
    CapturePlan,
    Location,
    ReleaseReason,
    StepInputs,
    StepPlan,
    StepShape,
    Variant,
)

VERSION = 4
"""Of all formats in this file. A change of one of them, or of the records that they hold, increases it."""

StepMessage = StepPlan | StepInputs | BlockCopies | CapturePlan

PLAN, REPEATED, INPUTS, COPIES, CAPTURE = range(1, 6)
"""Kinds of messages. A repeated plan is one with the epoch of the plan before: only what may differ is written."""

REASONS: tuple[ReleaseReason, ...] = (*get_args(FinishReason), "preempted")
"""Reasons of releases by their codes."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)
LOCATIONS: tuple[Location, ...] = get_args(Location)
"""Locations by their codes: the source is in the flags of a message, the target in those of the shape."""

# Flags of messages.
CAPTURES, TRAINED_RESTS, HAS_GROUPS, HAS_PLACES, HAS_TRAINED, HAS_MASKED, HAS_SCORED, HAS_POOLED = (
    1 << bit for bit in range(8)
)
HAS_MASKS, HAS_MASK_PLACES = 1, 2
IS_HEAD = 1

_HEAD = "<BBBxI"
"""Kind, flags, flags of the shape, number of the sequence."""
_SHAPE = "7i"
HEAD = Struct(_HEAD)
PLAN_HEAD = Struct(f"{_HEAD}qqdd9i{_SHAPE}")
"""Step, epoch, draft floor, worth of trained drafts; numbers of rows, block updates, shared blocks, admissions,
releases, records of appended and of forced tokens, copies of states, and how many of them go to rows; shape."""
REPEATED_HEAD = Struct(f"{_HEAD}qii{_SHAPE}4x")
"""Step, number of block updates, shared blocks; shape."""
INPUTS_HEAD = Struct(f"{_HEAD}qiii4x")
"""Step, number of masks, words of each, rows with drafts."""
COPIES_HEAD = Struct(f"{_HEAD}qi4x")
"""Number of the copies, number of blocks."""
CAPTURE_HEAD = Struct(f"{_HEAD}ii{_SHAPE}4x")
"""States and variant of a head, or a shape."""
ADMISSION = Struct("<qiiiiiii4x")
"""Request, row, prompt tokens, limit, computed tokens, adapter; number of tokens and bytes of parameters."""
RELEASE = Struct("<qii")
"""Request, row, reason."""
APPENDED = Struct("<iii4x")
"""Row, start, number of tokens."""
FORCED = Struct("<ii")
"""Row, number of tokens."""

ALIGNMENT = 8
GROUP_SHIFT = 24
"""A block update's group is in the upper bits of its row: there are fewer than 2**24 rows and 128 groups."""

INT32, INT64, UINT32, BOOL = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<u4"), np.dtype("?")


class StepBytesError(ValueError):
    """Bytes that are no step message, or not the next one."""


_SIZE_NAMES = ("tokens", "rows", "tiles", "long_from", "context", "parts", "places")
_FLAG_NAMES = ("is_decode", "shares_prefix", "has_decode_rows", "last_only", "is_exact", "adapters")
sizes_of_shape = attrgetter(*_SIZE_NAMES)
_flags_of_shape = attrgetter(*_FLAG_NAMES)


def shape_flags(shape: StepShape) -> int:
    flags: tuple[bool, bool, bool, bool, bool, bool] = _flags_of_shape(shape)
    decodes, shares, has_decode_rows, last_only, is_exact, adapters = flags
    return decodes | shares << 1 | has_decode_rows << 2 | last_only << 3 | is_exact << 4 | adapters << 5


def shape_from(sizes: tuple[int, ...], flags: int, last: StepShape | None = None) -> StepShape:
    """`last`: that of the step before, returned if it is the same, which takes a fraction of the time."""
    if last is not None and sizes_of_shape(last) == sizes and shape_flags(last) == flags:
        return last
    fields: dict[str, Any] = dict(zip(_SIZE_NAMES, sizes, strict=True))
    fields.update((name, bool(flags >> bit & 1)) for bit, name in enumerate(_FLAG_NAMES))
    return StepShape(**fields)
