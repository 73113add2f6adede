"""`--speculate auto` with a drafter: text where it has a good match, else the trained drafter; tokens stay the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from run.test_model_drafters import BLOCK, BUDGET, OUTPUT, ROWS, eagle, eagle3, load, medusa, requests, runner_of

from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.drafting import trained as trained_control
from millrace.plan.drafting.trained import TrainedControl
from millrace.plan.drafts import DraftSettings
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import Admission, Int32s, StepPlan
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress
from millrace.run.drafting.drafters import SOURCES, Drafters, make_drafters, offered_drafters
from millrace.run.protocol import StepResult
from millrace.run.runner import Runner

FIXED = DraftSettings(max_drafts=3, max_places=4 * ROWS)
CONTROLLED = DraftSettings(max_drafts=7, max_places=8 * ROWS, is_fixed=False, has_trained=True)


class RowDrafts(NamedTuple):
    source: str
    num_drafts: int
    num_accepted: int


def drafts_of(result: StepResult) -> list[RowDrafts]:
    """Of the rows that had any."""
    if result.sources is None or result.num_drafts is None or result.counts is None:
        return []
    columns = (result.sources.tolist(), result.num_drafts.tolist(), result.counts.tolist())
    return [RowDrafts(SOURCES[source], own, count - 1) for source, own, count in zip(*columns, strict=True) if own]


def drive(
    runner: Runner, drafts: DraftSettings, speculate: str = "auto", num_blocks: int = 60
) -> tuple[dict[int, list[int]], list[RowDrafts]]:
    """Tokens by request, and what became of all drafts. No time is measured, so controllers stay as they began."""
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_running=ROWS,
            token_budget=BUDGET,
            mixed_budget=16,
            drafts=drafts,
        )
    )
    for request in requests():
        params = msgspec.structs.replace(request.row_params.params, speculate=speculate)
        # The prompt twice: text is found in it.
        prompt = np.concatenate([request.prompt, request.prompt])[-40:]
        scheduler.submit(dataclasses.replace(request, prompt=prompt, row_params=RowParams(params, ())))
    tokens: dict[int, list[int]] = {}
    drafted: list[RowDrafts] = []
    flying: list[Any] = []
    while scheduler.has_work or flying:
        plan = scheduler.plan(0.0)
        if plan is not None:
            flying.append((plan, runner.launch(plan)))
        if len(flying) > 1 or plan is None:
            plan, pending = flying.pop(0)
            result = pending.wait()
            drafted += drafts_of(result)
            found = scheduler.confirm(plan.step_no, result.drawn(), result.counts, result.num_drafts, result.trained)
            scheduler.run_deferred()
            for request_id, token in zip(found.request_ids.tolist(), found.tokens.tolist(), strict=True):
                tokens.setdefault(request_id, []).append(token)
    assert all(len(own) == OUTPUT for own in tokens.values())
    return tokens, drafted


def sources(drafted: list[RowDrafts]) -> set[str]:
    return {part.source for part in drafted}


@pytest.mark.parametrize("drafts", [FIXED, CONTROLLED], ids=["fixed", "controlled"])
@pytest.mark.parametrize(("kind", "make"), [("eagle", eagle), ("eagle", eagle3), ("medusa", medusa)])
def test_both_sources_draft_and_no_token_changes(kind: str, make: Any, drafts: DraftSettings, tmp_path: Path) -> None:
    torch.manual_seed(5)
    decoder = load("llama")
    expected, _ = drive(runner_of(decoder, None, 60), DraftSettings())
    runner = runner_of(decoder, make(tmp_path, decoder), 60, "auto")
    tokens, drafted = drive(runner, drafts)
    assert tokens == expected
    assert sources(drafted) == {"suffix", kind}


@pytest.mark.parametrize("drafts", [FIXED, CONTROLLED], ids=["fixed", "controlled"])
def test_a_perfect_draft_model_stays_perfect_between_drafts_from_text(drafts: DraftSettings) -> None:
    """Its keys and values are right whoever drafted last, also after drafts from text that were refused."""
    decoder = load("llama_tied")
    expected, _ = drive(runner_of(decoder, None, 60), DraftSettings())
    tokens, drafted = drive(runner_of(decoder, load("llama_tied", grouped=False), 60, "auto"), drafts)
    assert tokens == expected
    assert sources(drafted) == {"suffix", "draft"}
    assert all(part.num_accepted == part.num_drafts for part in drafted if part.source == "draft")
    assert not all(part.num_accepted == part.num_drafts for part in drafted if part.source == "suffix")


@pytest.mark.parametrize(("kind", "make"), [("eagle", eagle), ("eagle", eagle3), ("medusa", medusa), ("draft", None)])
def test_a_drafter_that_rests_is_told_nothing_and_no_token_changes(
    kind: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    decoder = load("llama_tied")
    expected, _ = drive(runner_of(decoder, None, 60), DraftSettings())
    monkeypatch.setattr(trained_control, "FIRST_REST", 12)
    monkeypatch.setattr(trained_control, "LAST_REST", 12)
    monkeypatch.setattr(TrainedControl, "judge_trial", lambda control, rows: None)
    monkeypatch.setattr(TrainedControl, "__init__", resting(TrainedControl.__init__))
    model = load("llama_tied", spoilt=True) if make is None else make(tmp_path, decoder)
    runner = runner_of(decoder, model, 60, "auto")
    # Who proposed a draft, and when it rests, shows in no token.
    assert runner.drafted is not None
    drafter, rests = runner.drafted.drafters.by_name[kind], [False]
    told: list[bool] = []
    for name in ("feed", "take_states", "confirm"):
        monkeypatch.setattr(drafter, name, told_while(rests, told, getattr(drafter, name)))
    execute = runner.execute

    def watched(plan: StepPlan, given: Any) -> StepResult:
        rests[0] = plan.trained_rests
        return execute(plan, given)

    monkeypatch.setattr(runner, "execute", watched)
    tokens, drafted = drive(runner, CONTROLLED)
    assert tokens == expected
    assert sources(drafted) == {"suffix", kind}, "later requests try it again"
    assert told, "it is told of those"
    assert all(told), "while it rests it is told nothing"


def resting(init: Any) -> Any:
    def begin(control: TrainedControl, *args: Any) -> None:
        init(control, *args)
        control.rest(12)

    return begin


def told_while(rests: list[bool], told: list[bool], method: Any) -> Any:
    """`method`; notes of each call whether the drafter was awake."""

    def call(*args: Any) -> Any:
        told.append(not rests[0])
        return method(*args)

    return call


@pytest.mark.parametrize("named", ["suffix", "ngram", "draft"])
def test_a_request_may_name_one_source(named: str) -> None:
    decoder = load("llama_tied")
    runner = runner_of(decoder, load("llama_tied", grouped=False), 60, "auto")
    _, drafted = drive(runner, CONTROLLED, speculate=named)
    assert sources(drafted) == {named}


def test_results_say_which_drafts_the_trained_drafter_made() -> None:
    decoder = load("llama_tied")
    runner = runner_of(decoder, load("llama_tied", grouped=False), 300, "auto")
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=300,
            block_size=BLOCK,
            max_running=ROWS,
            token_budget=BUDGET,
            mixed_budget=16,
            drafts=CONTROLLED,
        )
    )
    scheduler.submit(requests()[1])
    counted, passes = 0, 0.0
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan is not None
        result = runner.launch(plan).wait()
        scheduler.confirm(plan.step_no, result.drawn(), result.counts, result.num_drafts, result.trained)
        scheduler.run_deferred()
        of_model = sum(part.num_drafts for part in drafts_of(result) if part.source == "draft")
        if result.trained is None:
            assert not of_model
            continue
        assert int(result.trained.num_drafts.sum()) == of_model
        assert of_model == 0 or result.trained.seconds > 0
        counted, passes = counted + of_model, passes + result.trained.seconds
    assert counted > 3


# --- the choice between sources ---


class Stub(Drafter):
    def __init__(self, token: int) -> None:
        self.token = token
        self.told: list[RowProgress] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        return [np.full(ask.max_drafts, self.token, np.int32) for ask in asks]

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        self.told += rows


def admission(row: int, speculate: str = "auto") -> Admission:
    params = RowParams(SamplingParams(speculate=speculate), ())
    return Admission(row, row, np.zeros(1, np.int32), 1, params, limit=99)


def test_text_must_promise_more_than_the_trained_drafter() -> None:
    drafters = make_drafters("auto", Stub(7), "eagle")
    assert drafters is not None
    drafters.admit(admission(0))
    repeated = np.tile(np.arange(30, 42, dtype=np.int32), 3)

    def proposed(tokens: Int32s, max_trained: int, worth: float) -> tuple[str, int]:
        ask = DraftAsk(0, tokens, 1, 4, max_trained=max_trained, min_gain=worth)
        (drafts,) = drafters.propose([ask])
        return (SOURCES[drafters.source_of(0)] if len(drafts) else "", len(drafts))

    assert proposed(repeated, 2, 0.5) == ("suffix", 4), "a long match promises more"
    drafters.admit(admission(0))
    assert proposed(repeated, 2, 3.9) == ("eagle", 2), "no match promises this much"
    drafters.admit(admission(0))
    assert proposed(np.arange(20, dtype=np.int32), 2, 0.0) == ("eagle", 2), "no match"
    drafters.admit(admission(0))
    assert proposed(np.arange(20, dtype=np.int32), 0, 0.0) == ("", 0), "neither pays"


def test_each_drafter_hears_of_its_own_drafts() -> None:
    text, trained = Stub(1), Stub(2)
    drafters = Drafters({"suffix": text, "ngram": Stub(3), "eagle": trained}, "auto", trained="eagle")
    drafters.admit(admission(0))
    drafters.admit(admission(1, "eagle"))
    tokens = np.arange(5, dtype=np.int32)
    drafters.propose([DraftAsk(0, tokens, 1, 3), DraftAsk(1, tokens, 1, 3)])
    assert (SOURCES[drafters.source_of(0)], SOURCES[drafters.source_of(1)]) == ("suffix", "eagle")
    assert (drafters.is_trained(0), drafters.is_trained(1)) == (False, True)
    drafters.confirm([RowProgress(0, tokens, 2, 3, 1), RowProgress(1, tokens, 3, 3, 2)])
    assert [(one.row, one.num_drafts, one.num_accepted) for one in text.told] == [(0, 3, 1)]
    assert [(one.row, one.num_drafts, one.num_accepted) for one in trained.told] == [(0, 0, 0), (1, 3, 2)]


def test_what_requests_may_name() -> None:
    assert offered_drafters("auto", False, "eagle") == ("off", "eagle", "ngram", "suffix")
    assert offered_drafters("auto", True, "eagle") == ("off", "eagle")
    assert offered_drafters("auto", False) == ("off", "suffix", "ngram")
    assert offered_drafters("eagle", True, "eagle") == ("off", "eagle")
    assert offered_drafters("off", False) == ("off",)
