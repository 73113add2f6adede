"""Places for drafts: how many tokens beyond its own each decoding row may verify in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.plan.drafting.control import NO_DRAFTS, DraftControl
from millrace.plan.drafting.looks import Looks
from millrace.plan.drafting.trained import TrainedControl, TrainedDecision
from millrace.plan.seating import Seating
from millrace.plan.step import Bools, Int32s, Int64s, StepPlan, TrainedDrafts, TrainedPlaces

NO_TEXT = 2.0
"""A `StepPlan.draft_floor` that no draft reaches: drafts from text lose at present."""
IDLE_MEASURED = 4
"""Of steps in which it was known that nothing would be drafted, one in so many is measured."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    max_drafts: int = 0
    """Drafts of one row in one step; 0 turns drafting off."""
    max_places: int = 1 << 30
    """Tokens that a step may verify in all, each row's own included."""
    is_fixed: bool = True
    """Always `max_drafts`; else as many as pay."""
    is_padded: bool = False
    """Every row of a step is computed with all its places, used or not."""
    is_weighed: bool = False
    """Drafters propose only drafts that are likely enough to pay, see `StepPlan.draft_floor`."""
    has_trained: bool = False
    """A trained drafter proposes where drafts from text do not pay."""


@dataclass(frozen=True, slots=True)
class DraftState:
    """What the controllers have decided, for figures."""

    length: int
    """Drafts of a row in use; 0 while they lose."""
    num_probes: int
    num_stops: int


class DraftPlaces:
    def __init__(self, settings: DraftSettings, seating: Seating) -> None:
        self._settings, self._seating, self._rows = settings, seating, seating.rows
        self.control = DraftControl(
            seating.rows.capacity,
            settings.max_drafts,
            is_padded=settings.is_padded,
            fixed=settings.is_fixed,
            is_weighed=settings.is_weighed,
        )
        self.trained_control: TrainedControl | None = None
        if settings.has_trained and settings.max_drafts and not settings.is_fixed:
            self.trained_control = TrainedControl(seating.rows.capacity, settings.max_drafts, self.control)
        self.looks = None if settings.is_padded or settings.is_fixed else Looks(seating.rows.capacity)
        self._idle_left, self._idle_epoch = 0, -1
        """Steps in which nothing is drafted while the rows have this `Rows.epoch`."""
        self.floor = 0.0
        self.trained: TrainedPlaces | None = None
        """`StepPlan.draft_floor` and `StepPlan.trained` of the places taken last."""
        self._measured: dict[int, tuple[int, float]] = {}
        """By step to be measured: drafts that it verified, and the time of a trained drafter."""

    @property
    def is_on(self) -> bool:
        """False if no step ever has drafts: then no row has slack."""
        return self._settings.max_drafts > 0

    @property
    def state(self) -> DraftState:
        control, trained = self.control, self.trained_control
        if trained is None:
            return DraftState(control.length, control.num_probes, control.num_stops)
        return DraftState(
            max(control.length, trained.length),
            control.num_probes + trained.num_probes,
            control.num_stops + trained.num_stops,
        )

    def take(self, singles: Int64s) -> Int32s | None:
        """Places for the drafts of each row, with the blocks for them; None if no row gets any.

        Drafts are optional: rows go without when blocks are short or when the step would verify too many tokens.
        """
        self.floor, self.trained = 0.0, None
        if not self._settings.max_drafts:
            return None
        if self._idle_left > 0 and self._idle_epoch == self._rows.epoch:
            self._skip_step()
            return None
        places = self._wanted(singles)
        if places is not None and not self._take_blocks(singles, places):
            places = None
        if places is None and self._rows.slack[singles].any():
            # Steps in flight verify drafts of these rows: only the device knows where this step begins.
            return np.zeros(len(singles), np.int32)
        self._idle_left, self._idle_epoch = 0 if places is not None else self._idle_steps(singles), self._rows.epoch
        return places

    @property
    def trained_rests(self) -> bool:
        """`StepPlan.trained_rests` of a step planned now."""
        return self.trained_control is not None and self.trained_control.rests

    def _wanted(self, singles: Int64s) -> Int32s | None:
        settings, rows = self._settings, self._rows
        per_row = min(settings.max_drafts, settings.max_places // max(1, len(singles)) - 1)
        if per_row <= 0 or len(singles) == 0 or not rows.can_draft[singles].any():
            return None
        ids, can_draft = rows.request_ids[singles], rows.can_draft[singles]
        looks = can_draft
        if self.looks is not None and not (self.trained_control is not None and self.trained_control.length):
            looks = can_draft & self.looks.due(singles, ids)
        decision = NO_DRAFTS
        if looks.any() or self.control.length == 0:
            decision = self.control.decide(singles, ids)
        text, self.floor = min(per_row, decision.max_drafts), decision.min_probability
        # The last token that the limit allows needs no draft before it.
        left = rows.limit[singles] - rows.known[singles] - 1
        looks = can_draft if decision.is_probe else looks
        places: Int32s = np.where(looks, np.clip(left, 0, text), 0).astype(np.int32)
        if self.trained_control is not None and not decision.measures_plain:
            trained = self._trained_places(
                self.trained_control.decide(singles, ids), can_draft, np.clip(left, 0, per_row)
            )
            self.floor = self.floor if text > 0 else NO_TEXT
            self.trained = trained
            places = np.maximum(places, trained.places)
        return places if places.any() else None

    def _idle_steps(self, singles: Int64s) -> int:
        """Steps from now in which certainly no row drafts. `singles`: those that decode in this step."""
        if self.looks is None or not len(singles) or len(singles) < len(self._rows.order):
            return 0  # The others will decode soon.
        if self.trained_control is not None and not self.trained_control.is_idle(singles):
            return 0
        return self.looks.steps_without(singles) if self.control.length else self.control.steps_without

    def _skip_step(self) -> None:
        assert self.looks is not None
        self._idle_left -= 1
        self.looks.skip()
        self.control.skip()
        if self.trained_control is not None:
            self.trained_control.skip()

    def _trained_places(self, decision: TrainedDecision | None, can_draft: Bools, most: Int64s) -> TrainedPlaces:
        if decision is None:
            return TrainedPlaces(np.zeros(len(can_draft), np.int32), 0.0)
        places = np.where(can_draft & decision.has_drafts, np.minimum(most, decision.length), 0)
        return TrainedPlaces(places.astype(np.int32), decision.worth)

    def _take_blocks(self, singles: Int64s, places: Int32s) -> bool:
        """Take blocks for the most that the rows can reach. False, with nothing taken, if there are not enough."""
        rows, size = self._rows, self._rows.block_size
        most = rows.computed[singles] + rows.slack[singles] + 1 + places
        columns = -(-np.minimum(most, rows.limit[singles]) // size) - rows.num_blocks[singles]
        if int(np.maximum(columns, 0).sum()) > self._seating.num_available_columns:
            return False
        for at in np.flatnonzero(columns > 0).tolist():
            self._seating.grow(int(singles[at]), int(columns[at]))
        return True

    def observe(
        self, plan: StepPlan, counts: Int32s, num_drafts: Int32s | None, trained: TrainedDrafts | None = None
    ) -> None:
        """A step with places was confirmed. `counts`: tokens of each sampling row. `num_drafts`: drafts that each had;
        None if only the places are known. `trained`: those that a trained drafter proposed beside drafts from text."""
        if plan.draft_places is None or self._settings.is_fixed or not plan.draft_places.any():
            return
        if not _only_decodes(plan):
            return
        # Where every row is computed with all places, a place without a draft costs as much as a wrong one.
        drafts = plan.draft_places if num_drafts is None or self._settings.is_padded else num_drafts
        drawn = (counts > 0) & (plan.draft_places > 0)  # The others are past their limit, or did not look.
        rows = plan.rows[drawn].astype(np.int64)
        ids, own, accepted = self._rows.request_ids[rows], drafts[drawn], counts[drawn] - 1
        if trained is not None and self.trained_control is not None:
            its = trained.num_drafts[drawn]
            has = its > 0
            self.trained_control.observe(rows[has], ids[has], its[has], accepted[has])
            own, accepted = np.where(has, 0, own), np.where(has, 0, accepted)
        has = own > 0
        if self.looks is not None:
            self.looks.observe(rows, np.where(has, accepted, 0), len(plan.rows))
        if has.any():
            self.control.observe_drafts(rows[has], ids[has], own[has], accepted[has])
        self._measured[plan.step_no] = int(drafts.sum()), self._drafting_s(trained)

    def _drafting_s(self, trained: TrainedDrafts | None) -> float:
        if trained is None or self.trained_control is None:
            return 0.0
        num_rows, num_passes = int((trained.num_drafts > 0).sum()), int(trained.num_drafts.max(initial=0))
        self.trained_control.observe_time(num_rows, num_passes, trained.seconds)
        return trained.seconds

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """A completed step occupied the device for this long."""
        if self._idle_left > 0 and plan.draft_places is None and plan.step_no % IDLE_MEASURED:
            return
        num_drafts, drafting_s = self._measured.pop(plan.step_no, (0, 0.0))
        if not self._settings.max_drafts or self._settings.is_fixed or seconds <= 0 or not _only_decodes(plan):
            return
        num_rows, has_places = len(plan.rows), plan.draft_places is not None
        if plan.draft_places is not None and self._settings.is_padded:
            num_drafts = num_rows * int(plan.draft_places.max())
        seconds = max(seconds - drafting_s, 0.0)
        if seconds:
            self.control.observe_time(num_rows, num_rows + num_drafts, seconds, has_places=has_places)


def _only_decodes(plan: StepPlan) -> bool:
    return bool(len(plan.rows)) and bool((plan.counts == 1).all()) and bool(plan.samples.all())
