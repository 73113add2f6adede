"""A runner that computes nothing: each step takes the time that the profile says, on a virtual clock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from millrace.engine.steps.repeated import OnTurn
from millrace.plan.pacing.step_time import CONTEXT, Floats, step_parts
from millrace.plan.shapes.declared import DeclaredShapes, OwnSizes
from millrace.plan.step import NO_EPOCH, BlockCopies, CapturePlan, Int32s, Location, StepInputs, StepPlan
from millrace.run.device.device import Pending
from millrace.run.protocol import StepResult
from millrace.run.sampling.masks import Uint32s
from millrace.simulate.clock import VirtualClock
from millrace.simulate.profile import Profile
from millrace.simulate.requests import END_TOKEN, FIRST_TOKEN, VOCABULARY

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


class StepNoise:
    """Factors by which steps are longer or shorter. Their mean is 1."""

    def __init__(self, spread: float, seed: int) -> None:
        self._spread, self._rng = spread, np.random.default_rng((seed, 1))
        self._drawn: Floats = np.ones(0)

    def look(self, count: int) -> Floats:
        """The next ones, which stay."""
        while len(self._drawn) < count:
            more = self._rng.normal(-0.5 * self._spread**2, self._spread, 1024)
            self._drawn = np.concatenate([self._drawn, np.exp(more)])
        return self._drawn[:count]

    def take(self, count: int) -> list[float]:
        taken: list[float] = self.look(count).tolist()
        self._drawn = self._drawn[count:]
        return taken


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
        self._context_s = profile.rates.context_token_s
        self._fixed_rates = self._rates.copy()
        self._fixed_rates[CONTEXT] = 0.0
        self._noise = StepNoise(profile.noise if has_noise else 0.0, seed)
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
        self._fixed_s = 0.0
        """Time of the last plan's step without its context."""
        self.epoch = NO_EPOCH
        """Parts and epoch of the last plan."""
        self._free_at = 0.0
        """When the device has completed all steps that were launched."""
        self._copied_at: defaultdict[tuple[Location, Location], float] = defaultdict(float)
        """When the copies of a kind that were launched have ended: one copier to and from the device, one thread that
        writes to the disk, and those that read it."""
        self.outside_s = 0.0
        """Device time of steps outside the profile's range."""
        self.num_drafts = self.num_accepted = 0

    @property
    def shapes(self) -> DeclaredShapes:
        return OwnSizes()

    def forward(self, plan: StepPlan, given: tuple[Int32s, ...] | None = None) -> None:
        for admission in plan.admitted:
            row = admission.row
            self._known[row], self._limit[row] = len(admission.tokens), admission.limit
            self._end[row] = admission.num_prompt + self.num_output[admission.request_id]
            self._salt[row] = admission.request_id * 31
        self._clock.sleep(self._profile.host_s)
        parts = self.parts_of(plan)
        seconds = (self._fixed_s + self._context_s * float(parts[CONTEXT])) * self._noise.take(1)[0]
        if self._profile.is_outside(parts):
            self.outside_s += seconds
        self._free_at = max(self._free_at, self._clock()) + seconds

    def parts_of(self, plan: StepPlan) -> Floats:
        """A step that repeats the one before reads one more token of context for each row."""
        if plan.repeats(self.epoch) and plan.draft_places is None:
            self._parts[CONTEXT] += len(plan.rows)
        else:
            self._parts = step_parts(plan)
            self._fixed_s = float(self._parts @ self._fixed_rates)
        self.epoch = plan.epoch if plan.draft_places is None else NO_EPOCH
        return self._parts

    def repeat(
        self, last: StepPlan, most: int, in_flight: Pending[StepResult] | None, on_turn: OnTurn
    ) -> tuple[Int32s, PricedStep | None] | None:
        """See `RepeatingRunner`. The same times and tokens as one step after the other."""
        rows = last.rows
        most = min(most, int((self._end[rows] - self._known[rows]).min()) - 1)
        if most < 2 or not last.repeats(self.epoch) or self.epoch == NO_EPOCH:
            return None
        contexts = self._parts[CONTEXT] + len(rows) * np.arange(1, most + 1)
        times = ((self._fixed_s + self._context_s * contexts) * self._noise.look(most)).tolist()
        pending, count = [in_flight.ends_at] if isinstance(in_flight, PricedStep) else [], 0
        now, free_at, host_s = self._clock(), self._free_at, self._profile.host_s
        for seconds in times:
            launched_at = now
            now += host_s
            free_at = (free_at if free_at > now else now) + seconds
            pending.append(free_at)
            if pending[count] > now:
                now = pending[count]
            count += 1
            if not on_turn(launched_at, now):
                break
        self._free_at = free_at
        self._clock.advance_to(now)
        self._noise.take(count)
        self._note_outside(contexts[:count], times)
        self._parts[CONTEXT] += len(rows) * count
        tokens = self._draw_many(rows, count)
        if not isinstance(in_flight, PricedStep):
            return tokens, None
        result = StepResult(last.step_no + count, _NO_TOKENS, None, _NO_INDEX, _NO_COUNTS, (), view=tokens[-1])
        drawn = np.concatenate([in_flight.result.drawn()[None], tokens[:-1]])
        return drawn, PricedStep(result, self._free_at, self._clock)

    def _note_outside(self, contexts: Floats, times: list[float]) -> None:
        parts = self._parts.copy()
        parts[CONTEXT] = contexts[-1]  # The largest.
        if not self._profile.is_outside(parts):
            return
        for context, seconds in zip(contexts.tolist(), times, strict=False):
            parts[CONTEXT] = context
            if self._profile.is_outside(parts):
                self.outside_s += seconds

    def _draw_many(self, rows: Int32s, count: int) -> Int32s:
        """Tokens [steps, rows], none of which ends its request."""
        positions = self._known[rows] + np.arange(count)[:, None]
        self._known[rows] += count
        return (FIRST_TOKEN + (self._salt[rows] + positions * 7) % VOCABULARY).astype(np.int32)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> PricedStep:
        rows = plan.rows[plan.samples]
        counts, num_drafts = None, None
        if plan.draft_places is not None:
            num_drafts = plan.draft_places[plan.samples]
            counts = self._accept(rows, num_drafts)
            rows = np.repeat(rows, counts)
        tokens = self._draw(rows, counts)
        result = StepResult(
            plan.step_no,
            _NO_TOKENS,
            None,
            _NO_INDEX,
            _NO_COUNTS,
            (),
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
        is_near, profile = "device" in (copies.source, copies.target), self._profile
        route: tuple[Location, Location] = ("device", "host") if is_near else (copies.source, copies.target)
        rate = profile.copy_bytes_per_s if is_near else profile.disk_bytes_per_s
        seconds = len(copies.blocks) * self._block_bytes / rate
        self._copied_at[route] = max(self._copied_at[route], self._clock()) + seconds
        return PricedCopy(seconds, self._copied_at[route], self._clock)

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
