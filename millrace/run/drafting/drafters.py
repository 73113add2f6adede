"""The drafters of a CPU engine, and which of them serves each row."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millrace.config import Speculation
from millrace.ops.base.draft_sources import OWN_DRAFTS
from millrace.plan.step import Admission, Int32s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress, RowTokens
from millrace.run.drafting.ngram import NgramDrafter
from millrace.run.drafting.prediction import PredictionDrafter
from millrace.run.drafting.replay import ReplayDrafter
from millrace.run.drafting.suffix import SuffixDrafter

PREDICTION = "prediction"
"""Source of drafts that the client sent with its request."""
GRAMMAR = "grammar"
"""Source of drafts that are the only tokens which the request's grammar allows."""
TEXT_DRAFTERS: tuple[Speculation, ...] = ("ngram", "suffix")
MODEL_DRAFTERS: tuple[Speculation, ...] = ("draft", "medusa", "eagle")
AUTO: Speculation = "auto"
SOURCES = ("", PREDICTION, GRAMMAR, *TEXT_DRAFTERS, *MODEL_DRAFTERS, "replay")
"""Where drafts come from, as results number it. The first is the engine's own drafter, whatever that is; the first two
are those that the kernels know (`ops/base/draft_sources.py`)."""
AUTO_TEXT: Speculation = "suffix"
"""The drafter from text that `auto` uses."""
_SOURCE_CODES = {name: code for code, name in enumerate(SOURCES)}
_NONE = np.zeros(0, np.int32)


class Drafters:
    def __init__(
        self, by_name: Mapping[str, Drafter], default: str, *, trained: str = "", takes_predictions: bool = True
    ) -> None:
        """`default` serves rows whose request names no drafter; AUTO: text first, then the `trained` one.
        `takes_predictions`: drafts come first from what the client expects."""
        self.by_name = by_name
        self._default = default
        self._trained = trained
        self._takes_predictions = takes_predictions
        self._prediction = PredictionDrafter()
        self._chosen: dict[int, str] = {}
        """Drafter by row, or AUTO."""
        self._sources: dict[int, str] = {}
        """By row with drafts in the current step: who proposed them."""
        self.trained_s = 0.0
        """Seconds that the trained drafter took to propose in the current step."""
        self._needs_hidden = any(drafter.needs_hidden for drafter in by_name.values())
        self._awake: set[int] = set()
        """Rows that the trained drafter follows."""

    def admit(self, admission: Admission) -> None:
        wanted = admission.row_params.params.speculate
        self._chosen[admission.row] = wanted if wanted in self.by_name else self._default
        if self._takes_predictions:
            self._prediction.admit(admission)
        for drafter in self.by_name.values():
            drafter.admit(admission)
        if self._trained:
            self._awake.add(admission.row)

    def rest(self, rows: Int32s) -> None:
        """The trained drafter drafts no more for these rows, and need not know what they compute."""
        if self._awake:
            self._awake.difference_update(rows.tolist())

    def is_followed(self, rows: Int32s) -> bool:
        """True if the trained drafter follows one of the rows: it must be told of every step."""
        return bool(self._awake) and not self._awake.isdisjoint(rows.tolist())

    def needs_hidden(self, rows: Int32s) -> bool:
        """True if a drafter needs the states of a step with these rows."""
        return self._needs_hidden and self.is_followed(rows)

    def release(self, row: int, tokens: Int32s, *, has_ended: bool) -> None:
        self._awake.discard(row)
        for drafter in self.by_name.values():
            drafter.release(row, tokens, has_ended=has_ended)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        """Drafts for each row: from its prediction, else from its drafters, in their order."""
        self._sources.clear()
        self.trained_s = 0.0
        drafts: list[Int32s] = [_NONE] * len(asks)
        self._propose(PREDICTION, self._prediction, asks, drafts, [self._prediction.has(ask.row) for ask in asks])
        for name, drafter in self.by_name.items():
            is_due = [not len(drafts[at]) and self._serves(name, ask.row) for at, ask in enumerate(asks)]
            if name == self._trained:
                self._propose_trained(drafter, asks, drafts, is_due)
            else:
                self._propose(name, drafter, asks, drafts, is_due)
        return drafts

    def take(self, asks: Sequence[DraftAsk], given: list[Int32s]) -> list[Int32s]:
        """The drafts that another rank proposed, as those of the current step."""
        self._sources = {ask.row: self._default for ask in asks}
        return given

    def _serves(self, name: str, row: int) -> bool:
        if name == self._trained and row not in self._awake:
            return False
        chosen = self._chosen[row]
        return chosen == name or (chosen == AUTO and name in (AUTO_TEXT, self._trained))

    def _propose(
        self, name: str, drafter: Drafter, asks: Sequence[DraftAsk], drafts: list[Int32s], is_due: Sequence[bool]
    ) -> None:
        due = [at for at, is_own in enumerate(is_due) if is_own]
        if not due:
            return
        for at, proposed in zip(due, drafter.propose([asks[at] for at in due]), strict=True):
            if len(proposed):
                drafts[at] = proposed
                self._sources[asks[at].row] = name

    def _propose_trained(
        self, drafter: Drafter, asks: Sequence[DraftAsk], drafts: list[Int32s], is_due: Sequence[bool]
    ) -> None:
        own = [ask if ask.max_trained is None else replace(ask, max_drafts=ask.max_trained) for ask in asks]
        began = time.perf_counter()
        self._propose(
            self._trained,
            drafter,
            own,
            drafts,
            [due and ask.max_drafts > 0 for due, ask in zip(is_due, own, strict=True)],
        )
        self.trained_s = time.perf_counter() - began

    def source_of(self, row: int) -> int:
        """Who proposed the row's drafts in the current step: an index of `SOURCES`."""
        return _SOURCE_CODES.get(self._sources[row], OWN_DRAFTS)

    def is_trained(self, row: int) -> bool:
        """True if the trained drafter did."""
        return self._sources.get(row) == self._trained

    def claim(self, row: int, source: str) -> None:
        """The row's drafts in the current step were replaced by those of another source."""
        self._sources[row] = source

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        """`num_drafts` counts all drafts of a row; each drafter is told of its own."""
        self._prediction.confirm([own for own in rows if self._sources.get(own.row) == PREDICTION])
        for name, drafter in self.by_name.items():
            own = [self._own_progress(name, progress) for progress in rows if self._serves(name, progress.row)]
            if own:
                drafter.confirm(own)

    def _own_progress(self, name: str, progress: RowProgress) -> RowProgress:
        if not progress.num_drafts or self._sources.get(progress.row) == name:
            return progress
        return replace(progress, num_drafts=0, num_accepted=0)

    def feed(self, rows: Sequence[RowTokens]) -> None:
        """Only for rows that the trained drafter follows; the others keep no state between steps."""
        awake = [own for own in rows if own.row in self._awake]
        if awake:
            self.by_name[self._trained].feed(awake)

    def leave(self, rows: Sequence[RowTokens]) -> None:
        awake = [own for own in rows if own.row in self._awake]
        if awake:
            self.by_name[self._trained].leave(awake)

    def take_states(self, rows: Int32s, starts: Int32s, counts: Int32s, states: Tensor) -> None:
        if not self._trained:
            return
        is_awake = np.fromiter((row in self._awake for row in rows.tolist()), np.bool_, len(rows))
        if not is_awake.all():
            states = states[torch.from_numpy(np.repeat(is_awake, counts))]
            rows, starts, counts = rows[is_awake], starts[is_awake], counts[is_awake]
        if len(rows):
            self.by_name[self._trained].take_states(rows, starts, counts, states)

    def take_hidden(self, hidden: Tensor, rows: Int32s, positions: Int32s) -> None:
        for drafter in self.by_name.values():
            drafter.take_hidden(hidden, rows, positions)


def make_drafters(speculate: Speculation, model: Drafter | None = None, kind: str = "") -> Drafters | None:
    """None if the engine proposes no drafts. `model`: the drafter that is a model, if there is one, of this kind."""
    if speculate == "off":
        return None
    if speculate == "replay":
        return Drafters({"replay": ReplayDrafter()}, "replay", takes_predictions=False)
    drafters: dict[str, Drafter] = {AUTO_TEXT: SuffixDrafter(), "ngram": NgramDrafter()}
    if model is None:
        return Drafters(drafters, AUTO_TEXT if speculate == AUTO else speculate)
    # The trained one comes last: it drafts for rows that no text was found for.
    return Drafters(drafters | {kind: model}, speculate, trained=kind)


def offered_drafters(speculate: Speculation, pads_drafts: bool, kind: str = "") -> tuple[str, ...]:
    """What a request may name as `speculate`, beside `auto`. `kind`: of the drafter that is a model. `pads_drafts`:
    one drafter fills all places, see `DeviceDefaults`."""
    if speculate == "off":
        return ("off",)
    own = kind or (AUTO_TEXT if speculate == AUTO else speculate)
    named = {"off": None, own: None}
    if not pads_drafts and speculate != "replay":
        named |= dict.fromkeys(TEXT_DRAFTERS)
    return tuple(named)
