"""Places for drafts from text and from a trained drafter: who may fill them, and what each controller learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.inside import part_of

from millrace.params.rows import DEFAULT_ROW_PARAMS
from millrace.plan.drafting.control import NO_DRAFTS, DraftDecision
from millrace.plan.drafting.trained import TrainedDecision
from millrace.plan.drafts import NO_TEXT, DraftPlaces, DraftSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import StepPlan, TrainedDrafts

SETTINGS = DraftSettings(max_drafts=5, is_fixed=False, has_trained=True)


def decoding(
    num_rows: int = 2, settings: DraftSettings = SETTINGS, max_tokens: int = 30
) -> tuple[Scheduler, DraftPlaces]:
    """A scheduler whose rows have drawn their first token."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=256,
            block_size=4,
            max_running=4,
            token_budget=32,
            mixed_budget=32,
            drafts=settings,
        )
    )
    for index in range(num_rows):
        prompt = np.arange(5, dtype=np.int32)
        scheduler.submit(Request(id=index, prompt=prompt, max_tokens=max_tokens, row_params=DEFAULT_ROW_PARAMS))
    while (scheduler.rows.known_host[:num_rows] < 6).any():
        plan = planned(scheduler)
        num_drawn = int(plan.samples.sum())
        counts = None if plan.draft_places is None else np.ones(num_drawn, np.int32)
        scheduler.apply(plan.step_no, np.full(num_drawn, 9, np.int32), counts)
    # Tests put fixed decisions in place of the controllers', which no plan can force.
    return scheduler, part_of(scheduler, "drafts")


def decide(drafts: DraftPlaces, text: DraftDecision, trained: TrainedDecision | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts.control, "decide", lambda rows, ids: text)
    monkeypatch.setattr(drafts.trained_control, "decide", lambda rows, ids: trained)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


ONE_OF_TWO = TrainedDecision(2, np.array([True, False]), 0.5)


@pytest.mark.parametrize(
    ("text", "places", "floor"),
    [(DraftDecision(4, 0.3), [4, 4], 0.3), (DraftDecision(1, 0.3), [2, 1], 0.3), (NO_DRAFTS, [2, 0], NO_TEXT)],
    ids=["more from text", "more trained", "text loses"],
)
def test_a_row_has_places_for_either_source(text: Any, places: list[int], floor: float, monkeypatch: Any) -> None:
    scheduler, drafts = decoding()
    decide(drafts, text, ONE_OF_TWO, monkeypatch)
    plan = planned(scheduler)
    assert plan.draft_places is not None
    assert plan.trained is not None
    assert plan.draft_places.tolist() == places
    assert plan.draft_floor == floor
    assert (plan.trained.places.tolist(), plan.trained.worth) == ([2, 0], 0.5)


def test_where_neither_pays_a_step_is_plain(monkeypatch: Any) -> None:
    scheduler, drafts = decoding()
    decide(drafts, NO_DRAFTS, None, monkeypatch)
    plan = planned(scheduler)
    assert (plan.draft_places, plan.trained) == (None, None)


def test_a_step_that_measures_plain_steps_has_no_trained_drafts_either(monkeypatch: Any) -> None:
    scheduler, drafts = decoding()
    decide(drafts, DraftDecision(0, 0.0, measures_plain=True), ONE_OF_TWO, monkeypatch)
    assert planned(scheduler).draft_places is None


def test_rows_that_take_no_drafts_have_no_places(monkeypatch: Any) -> None:
    scheduler, drafts = decoding()
    decide(drafts, DraftDecision(4, 0.3), TrainedDecision(2, np.ones(2, np.bool_), 0.5), monkeypatch)
    scheduler.rows.can_draft[scheduler.rows.order[0]] = False
    plan = planned(scheduler)
    assert plan.trained is not None
    assert plan.trained.places.tolist() == [0, 2]


def test_each_controller_learns_from_its_own_drafts_and_times(monkeypatch: Any) -> None:
    scheduler, drafts = decoding()
    decide(drafts, DraftDecision(2, 0.3), TrainedDecision(2, np.array([True, True]), 0.5), monkeypatch)
    trained, told, passes, steps = drafts.trained_control, [], [], []
    assert trained is not None
    monkeypatch.setattr(drafts.control, "observe_drafts", lambda *columns: told.append([c.tolist() for c in columns]))
    monkeypatch.setattr(trained, "observe", lambda *columns: told.append([c.tolist() for c in columns]))
    monkeypatch.setattr(trained, "observe_time", lambda *numbers: passes.append(numbers))
    monkeypatch.setattr(
        drafts.control, "observe_time", lambda rows, tokens, seconds, has_places: steps.append((rows, tokens, seconds))
    )
    plan = planned(scheduler)
    first, second = plan.rows.tolist()
    # The first row had two drafts of the trained drafter, one of them right; the second had two from text, both right.
    tokens, counts = np.array([1, 2, 3, 4, 5], np.int32), np.array([2, 3], np.int32)
    by_model = TrainedDrafts(np.array([2, 0], np.int32), 0.004)
    scheduler.confirm(plan.step_no, tokens, counts, np.array([2, 2], np.int32), by_model)
    scheduler.observe_step(plan, 0.024)
    assert told == [[[first], [0], [2], [1]], [[second], [1], [2], [2]]]
    assert passes == [(1, 2, 0.004)]
    assert steps == [(2, 6, pytest.approx(0.020))]


def step(scheduler: Scheduler, num_found: int, num_accepted: int) -> StepPlan:
    """One step: each row with places has so many drafts."""
    plan = planned(scheduler)
    counts = found = None
    if plan.draft_places is not None:
        found = np.minimum(plan.draft_places, num_found).astype(np.int32)
        counts = 1 + np.minimum(found, num_accepted).astype(np.int32)
    num_tokens = len(plan.rows) if counts is None else int(counts.sum())
    scheduler.confirm(plan.step_no, np.full(num_tokens, 9, np.int32), counts, found)
    scheduler.run_deferred()
    scheduler.observe_step(plan, 0.01)
    return plan


@pytest.mark.parametrize("num_found", [0, 2])
def test_rows_that_find_nothing_right_look_seldom(num_found: int) -> None:
    scheduler, _ = decoding(1, DraftSettings(max_drafts=2, is_fixed=False), max_tokens=600)
    looks = [step(scheduler, num_found, 0).draft_places is not None for _ in range(300)]
    assert 3 < sum(looks[:40]) < 25
    assert 4 < sum(looks[100:]) < 12
    while step(scheduler, 2, 2).draft_places is None:
        pass
    assert sum(step(scheduler, 2, 2).draft_places is not None for _ in range(20)) > 15, "what it finds is right again"


def test_an_accepted_draft_pays_for_the_next_looks() -> None:
    scheduler, _ = decoding(1, DraftSettings(max_drafts=2, is_fixed=False), max_tokens=600)
    for _ in range(200):
        step(scheduler, 0, 0)
    while step(scheduler, 2, 2).draft_places is None:
        pass
    looks = [step(scheduler, 0, 0).draft_places is not None for _ in range(60)]
    assert all(looks[1:5]), "as often as two drafts pay for"
    assert sum(looks[20:]) < 8


def looks_of_a_new_request(num_found: int) -> list[bool]:
    """In its first steps, beside a row that looked for a while and always had so many right drafts."""
    scheduler, _ = decoding(1, DraftSettings(max_drafts=2, is_fixed=False), max_tokens=900)
    for _ in range(250):
        step(scheduler, num_found, num_found)
    prompt = np.arange(3, dtype=np.int32)
    scheduler.submit(Request(id=7, prompt=prompt, max_tokens=60, row_params=DEFAULT_ROW_PARAMS))
    plans = [step(scheduler, num_found, num_found) for _ in range(12)]
    return [plan.draft_places is not None and len(plan.rows) == 2 and plan.draft_places[1] > 0 for plan in plans]


def test_a_new_request_looks_as_often_as_that_helped_others() -> None:
    assert sum(looks_of_a_new_request(2)) > 5
    assert sum(looks_of_a_new_request(0)) < 3


def test_a_new_request_need_not_wait_for_rows_that_found_nothing() -> None:
    scheduler, drafts = decoding(1, DraftSettings(max_drafts=2, is_fixed=False), max_tokens=600)
    for _ in range(150):
        step(scheduler, 0, 0)
    assert drafts.looks is not None
    # As if looking had helped other rows, of which there are none here.
    drafts.looks.useful = 1.0
    prompt = np.arange(3, dtype=np.int32)
    scheduler.submit(Request(id=7, prompt=prompt, max_tokens=30, row_params=DEFAULT_ROW_PARAMS))
    new = [step(scheduler, 0, 0) for _ in range(7)][2:]
    places = [plan.draft_places.tolist() for plan in new if plan.draft_places is not None]
    assert [0, 2] in places, "the row that found nothing does not look with it"


def test_always_the_same_number_of_drafts_needs_no_controller() -> None:
    scheduler, drafts = decoding(settings=DraftSettings(max_drafts=3, has_trained=True))
    assert drafts.trained_control is None
    plan = planned(scheduler)
    assert plan.draft_places is not None
    assert (plan.draft_places.tolist(), plan.trained) == ([3, 3], None)
