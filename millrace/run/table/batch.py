"""The rows that a forward pass computes: those of a plan, or others that the runner derives from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.plan.step import Bools, Int32s


class StepRows(Protocol):
    """Columns that a `StepPlan` has too, with the same meaning. Nobody writes them."""

    @property
    def rows(self) -> Int32s: ...
    @property
    def starts(self) -> Int32s: ...
    @property
    def counts(self) -> Int32s: ...
    @property
    def samples(self) -> Bools: ...
    @property
    def scored(self) -> Bools | None: ...
    @property
    def pooled(self) -> Bools | None: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(slots=True)  # Never modified, but a frozen dataclass takes several times as long to create.
class StepBatch:
    rows: Int32s
    starts: Int32s
    counts: Int32s
    samples: Bools
    scored: Bools | None = None
    pooled: Bools | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())
