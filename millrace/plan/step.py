"""StepPlan: what one step does. The scheduler emits it, every rank receives it, the runner executes it,
the simulator prices it. Columns for the many, records only for what changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from millrace.params import FinishReason, RowParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FEW = 16
"""So few numbers are added sooner one by one than by a call for many."""

ReleaseReason = FinishReason | Literal["preempted"]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a table row. Sent once, and again after a failed step to bring the runner back in line."""

    row: int
    request_id: int
    tokens: Int32s
    """Every token known on the host: the prompt, and what was generated before a preemption."""
    num_prompt: int
    row_params: RowParams


@dataclass(frozen=True, slots=True)
class Release:
    """A row's request left it. The row is handed out again only after every launched step has completed."""

    row: int
    request_id: int
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_no: int
    rows: Int32s
    """Table rows of this step: those with one token first, then longer chunks."""
    starts: Int32s
    """Per row: position of its first token in this step."""
    counts: Int32s
    samples: Bools
    """Whether the row's chunk reaches its last known token, so that a new one is drawn."""
    block_rows: Int32s
    """Blocks given since the last plan: block_tables[block_rows, block_cols] = block_ids."""
    block_cols: Int32s
    block_ids: Int32s
    admitted: tuple[Admission, ...] = ()
    released: tuple[Release, ...] = ()
    shared_blocks: int = 0
    """Leading blocks that every row of the step has in common; told only of steps of single tokens."""
    is_repeated_decode: bool = False
    """The rows are those of the plan before, in its order, each with one token: the one that it drew there. None is
    admitted or released. What depends on nothing but the rows still holds."""

    @property
    def num_tokens(self) -> int:
        if self.is_repeated_decode:
            return len(self.rows)
        return sum(self.counts.tolist()) if len(self.counts) < FEW else int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event of a request, as the scheduler knows it."""

    request_id: int
    reason: FinishReason
    message: str = ""
    stop_token_id: int = -1
    num_prompt: int = 0
    num_output: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    story: object = None
    """The request's `Story`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a completed step gave to requests that are still there. Columns over its delivered tokens."""

    step_no: int
    request_ids: Int64s
    tokens: Int32s
    sample_index: Int64s
    """Position of each delivered token among the step's sampled rows, to find its log-probabilities."""
    first_ids: Int64s
    """Requests that got their first token in this step."""
    ended: tuple[Ended, ...]
