"""Draws of launched steps. A draw is queued in one of two ways: after its masks, or behind a gate that its masks open.

Masks depend on the tokens of the step before. Computing them hides behind the forward pass. Where the device itself can
wait, the draw is queued with the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from millrace.plan.step import Int32s, Int64s, StepInputs, StepOutcome, StepPlan
from millrace.run.device.device import Pending
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import AnyRunner, StepResult
from millrace.run.sampling.masks import MaskedRows, Masks, Uint32s

SLOW_MASKS_S = 0.0006
"""Masks of a step that take longer hold up its draw. Otherwise the forward pass hides them."""
LOOK_EVERY = 16
"""Steps between two searches for long forced text, which take about 0.3 ms: masks may be slow for another reason."""


class MaskSource(Protocol):
    """Which tokens the grammars of running requests allow next."""

    def consume(self, outcome: StepOutcome) -> None:
        """These tokens were drawn. Requests without a grammar are ignored."""

    def masks(self, rows: MaskedRows, bits: Uint32s) -> Masks:
        """The masks of these rows and their drafts, in `bits`. Another thread can run meanwhile."""

    def forced(self, rows: MaskedRows, masks: Masks) -> list[tuple[int, list[int]]]:
        """The requests whose next mask, just computed, allows one token only, each with the tokens that must come.
        Those tokens are remembered: further masks of such a request take no time."""


@dataclass(slots=True)
class Launched:
    plan: StepPlan
    at: float
    masked_ids: Int64s
    """The requests of its masked rows. Rows change hands when a later step is planned, also in another thread."""
    pending: Pending[StepResult] | None = None
    """None until its draw is queued."""
    gate: tuple[MaskedRows, Masks] | None = None
    """The masks that its draw, which is queued, waits for."""

    @property
    def needs_masks(self) -> bool:
        return self.pending is None or self.gate is not None


class Draws:
    def __init__(
        self,
        runner: AnyRunner,
        masks: MaskSource | None,
        *,
        append: Callable[[int, list[int]], int],
        facts: RunnerFacts,
        clock: Callable[[], float],
    ) -> None:
        """`append` gives a request the tokens that its grammar forces and returns how many draws that saves."""
        self._runner = runner
        self._masks = masks
        self._append = append
        self._facts = facts
        self._clock = clock
        self.forced: dict[int, list[int]] = {}
        """By request: what its grammar forces after the step that drew masked rows last. Drafts of the next plan."""
        self.num_jumped = 0
        """Tokens that were appended without a draw."""
        self._looked_at = 0
        """The step after whose masks forced text was searched for last."""

    def queue(self, launched: Launched) -> None:
        """Queue the draw after its masks. All steps before it are confirmed if it has any."""
        plan = launched.plan
        if plan.masked is None or self._masks is None:
            launched.pending = self._runner.draw(plan)
            return
        rows, drafts = self._masked_rows(launched)
        masks = self._masks.masks(rows, self._runner.mask_memory(rows.num_masks))
        launched.pending = self._runner.draw(plan, StepInputs(plan.step_no, masks, drafts))
        # While the device draws: the next step needs it, this draw does not.
        jumps, self.forced = self.jumps(plan), {}
        if jumps or (self._facts.takes_forced and plan.draft_places is not None):
            self._use_forced(rows, self._masks.forced(rows, masks), jumps=jumps)

    def queue_behind_gate(self, launched: Launched) -> None:
        """Queue the draw before its masks are known: it waits for them on the device, as the plan says."""
        plan = launched.plan
        if self._masks is None:
            return
        rows, _ = self._masked_rows(launched)
        masks = rows.masks(self._runner.mask_memory(rows.num_masks))
        launched.gate = rows, masks
        launched.pending = self._runner.draw_ahead(plan, StepInputs(plan.step_no, masks))
        if launched.pending is None:
            launched.gate = None

    def fill(self, launched: Launched) -> Callable[[], None]:
        """Compute the masks that a queued draw waits for, and let it begin. Returns what to do once the next step is
        launched."""
        assert self._masks is not None
        assert launched.gate is not None
        source, (rows, masks), began = self._masks, launched.gate, self._clock()
        try:
            source.masks(rows, masks.bits)
        finally:
            self.open_gate(launched)
        self.forced = {}
        is_slow, step_no = self._clock() - began > SLOW_MASKS_S, launched.plan.step_no

        def look() -> None:
            if is_slow and step_no >= self._looked_at + LOOK_EVERY:
                self._looked_at = step_no
                source.forced(rows, masks)  # Long forced text may be why: its further masks take no time.

        return look

    def open_gate(self, launched: Launched) -> None:
        """Whatever has failed: until this, the device waits, and so does everything queued behind the draw."""
        if launched.gate is not None:
            launched.gate = None
            self._runner.masks_ready()

    def jumps(self, plan: StepPlan) -> bool:
        """True if rows of the step may continue after tokens that are appended without a draw."""
        return len(plan.rows) <= self._facts.max_jump_rows

    def consume(self, outcome: StepOutcome) -> None:
        if self._masks is not None:
            self._masks.consume(outcome)

    def _masked_rows(self, launched: Launched) -> tuple[MaskedRows, tuple[Int32s, ...]]:
        """Which rows need masks, and the drafts of all rows that draw."""
        plan, ids = launched.plan, launched.masked_ids
        assert plan.masked is not None
        index = np.flatnonzero(plan.masked[plan.samples])
        if plan.draft_places is None or not plan.draft_places.any():
            return MaskedRows(index, ids, [[] for _ in ids]), ()
        drafts = self._runner.drafts()
        return MaskedRows(index, ids, [drafts[at].tolist() for at in index.tolist()]), drafts

    def _use_forced(self, rows: MaskedRows, forced: list[tuple[int, list[int]]], *, jumps: bool) -> None:
        """Rows continue after the tokens that their grammars force, or have them as drafts in the next step. The step
        launched last draws the first of them."""
        takes_drafts = self._facts.takes_forced
        drafts = dict(zip(rows.request_ids.tolist(), rows.drafts, strict=True)) if takes_drafts else {}
        for request_id, tokens in forced:
            num_saved = self._append(request_id, tokens) if jumps and len(tokens) > self._facts.min_jump else 0
            self.num_jumped += num_saved
            if not num_saved and takes_drafts:
                # The step launched last gives as many of them as it has right drafts, and one more.
                self.forced[request_id] = tokens[1 + _num_equal(drafts[request_id], tokens) :]


def _num_equal(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
