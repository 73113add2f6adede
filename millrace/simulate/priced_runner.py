"""A runner that computes nothing: each step takes the time that the profile says, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from millrace.plan.pacing.step_time import Floats, step_parts
from millrace.plan.shapes.table import ShapeFacts
from millrace.plan.step import NO_EPOCH, BlockCopies, CapturePlan, HeadShape, Int32s, StepInputs, StepPlan
from millrace.run.runner import StepResult
from millrace.run.sampling.masks import Uint32s
from millrace.simulate.clock import VirtualClock
from millrace.simulate.profile import Profile
from millrace.simulate.requests import END_TOKEN, FIRST_TOKEN, VOCABULARY

CONTEXT = 3
"""Index of the context of decode rows in `step_parts`."""
_NO_TOKENS = torch.zeros(0, dtype=torch.int32)
_NO_INDEX, _NO_COUNTS = np.zeros(0, np.int64), np.zeros(0, np.int32)


@dataclass(slots=True)
class PricedStep:
    result: StepResult
    ends_at: float
    clock: VirtualClock

    def done(self) -> bool:
        return self.clock() >= self.ends_at

    def wait(self) -> StepResult:
        self.clock.advance_to(self.ends_at)
        return self.result


@dataclass(slots=True)
class PricedCopy:
    seconds: float
    ends_at: float
    clock: VirtualClock

    def done(self) -> bool:
        return self.clock() >= self.ends_at

    def wait(self) -> float:
        self.clock.advance_to(self.ends_at)
        return self.seconds


class PricedRunner:
    """Steps follow each other on the device; a step begins when it is launched and the one before has ended."""

    is_built = True

    def __init__(
        self,
        profile: Profile,
        clock: VirtualClock,
        *,
        max_rows: int,
        block_bytes: int,
        acceptance: float = 0.0,
        has_noise: bool = True,
        seed: int = 0,
    ) -> None:
        """`acceptance`: probability that a draft is accepted if those before it are."""
        self._profile, self._clock, self._block_bytes = profile, clock, block_bytes
        self._rates, self._rng, self._acceptance = profile.rates.column(), np.random.default_rng(seed), acceptance
        self._noise = profile.noise if has_noise else 0.0
        self.num_output: dict[int, int] = {}
        """By request: tokens of its answer, the last of which ends it."""
        self._known = np.zeros(max_rows, np.int64)
        """By row: tokens, those drawn by steps in flight included."""
        self._end = np.zeros(max_rows, np.int64)
        """By row: tokens when its answer is complete."""
        self._limit = np.zeros(max_rows, np.int64)
        self._salt = np.zeros(max_rows, np.int64)
        """By row: tells answers of different requests apart."""
        self._parts: Floats = np.zeros(5)
        self._epoch = NO_EPOCH
        """Parts and epoch of the last plan."""
        self._free_at = self._copier_free_at = 0.0
        """When the device has completed all steps, or copies, that were launched."""
        self.outside_s = 0.0
        """Device time of steps outside the profile's range."""
        self.num_drafts = self.num_accepted = 0

    @property
    def shapes(self) -> ShapeFacts | None:
        return None

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        for admission in plan.admitted:
            row = admission.row
            self._known[row], self._limit[row] = len(admission.tokens), admission.limit
            self._end[row] = admission.num_prompt + self.num_output[admission.request_id]
            self._salt[row] = admission.request_id * 31
        self._clock.sleep(self._profile.host_s)
        parts = self._parts_of(plan)
        seconds = float(parts @ self._rates)
        if self._noise:
            # Disturbances only make steps longer or shorter by a factor, whose mean is 1.
            seconds *= float(np.exp(self._rng.normal(-0.5 * self._noise**2, self._noise)))
        if self._profile.is_outside(parts):
            self.outside_s += seconds
        self._free_at = max(self._free_at, self._clock()) + seconds

    def _parts_of(self, plan: StepPlan) -> Floats:
        """A step that repeats the one before reads one more token of context for each row."""
        if plan.repeats(self._epoch) and plan.draft_places is None:
            self._parts[CONTEXT] += len(plan.rows)
        else:
            self._parts = step_parts(plan)
        self._epoch = plan.epoch if plan.draft_places is None else NO_EPOCH
        return self._parts

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> PricedStep:
        rows = plan.rows[plan.samples]
        counts, num_drafts = None, None
        if plan.draft_places is not None:
            num_drafts = plan.draft_places[plan.samples]
            counts = self._accept(rows, num_drafts)
            rows = np.repeat(rows, counts)
        tokens = self._draw(rows, counts)
        result = StepResult(
            *(plan.step_no, _NO_TOKENS, None, _NO_INDEX, _NO_COUNTS, ()),
            view=tokens,
            counts=counts,
            num_drafts=num_drafts,
        )
        return PricedStep(result, self._free_at, self._clock)

    def _accept(self, rows: Int32s, num_drafts: Int32s) -> Int32s:
        """Tokens of each row: its accepted drafts and one more, as far as its limit."""
        chances = self._rng.random((len(rows), int(num_drafts.max(initial=0))))
        is_accepted = (chances < self._acceptance) & (np.arange(chances.shape[1]) < num_drafts[:, None])
        accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        self.num_drafts += int(num_drafts.sum())
        self.num_accepted += int(accepted.sum())
        left = np.minimum(self._limit[rows], np.maximum(self._end[rows], self._known[rows] + 1)) - self._known[rows]
        counts: Int32s = np.clip(accepted + 1, 0, left).astype(np.int32)
        return counts

    def _draw(self, rows: Int32s, counts: Int32s | None) -> Int32s:
        """One token for each of these rows, which come several times if they draw several."""
        positions = self._known[rows]
        if counts is not None:
            firsts = np.repeat(np.cumsum(counts) - counts, counts)
            positions = positions + np.arange(len(rows)) - firsts
        self._known[rows] = positions + 1  # The last one of each row is what stays.
        tokens = FIRST_TOKEN + (self._salt[rows] + positions * 7) % VOCABULARY
        tokens[positions + 1 == self._end[rows]] = END_TOKEN
        return tokens.astype(np.int32)

    def copy(self, copies: BlockCopies) -> PricedCopy:
        seconds = len(copies.blocks) * self._block_bytes / self._profile.copy_bytes_per_s
        self._copier_free_at = max(self._copier_free_at, self._clock()) + seconds
        return PricedCopy(seconds, self._copier_free_at, self._clock)

    # -- what a simulation has no use for ----------------------------------------------------------------------------

    def drafts(self) -> tuple[Int32s, ...]:
        return ()

    def mask_memory(self, count: int) -> Uint32s:
        raise AssertionError("no simulated request has a grammar")

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> PricedStep | None:
        return None

    def masks_ready(self) -> None: ...

    def build_next(self) -> None: ...

    def capture(self, plan: CapturePlan) -> bool:
        return False

    def take_missed(self) -> list[HeadShape]:
        return []
