"""Large batches plan the next step while masks are computed: the answers are the same."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from helpers.fake_channel import FakeChannel
from helpers.fake_clock import FakeClock
from helpers.fake_runner import FakeDevice, FakeRunner, run_engine, waiting_shapes

pytest.importorskip("llguidance")

from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.cycle import Confirmed, Cycle
from millrace.engine.grammars import ALL_TOKENS, Grammars
from millrace.engine.loop import Engine
from millrace.engine.parts import EngineParts
from millrace.link.messages import NewRequest, pack_tokens
from millrace.params.grammar import Grammar
from millrace.params.sampling import SamplingParams
from millrace.plan.planner.protocol import ChosenRows
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import Ended, StepInputs, StepOutcome, StepPlan
from millrace.run.facts import RunnerFacts
from millrace.run.sampling.masks import MaskedRows, Masks, Uint32s
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.stand_in import build_stand_in

END, VOCAB = 299, 300
SCHEMA = Grammar("json_schema", '{"type": "array", "items": {"enum": ["left", "right", "none"]}, "minItems": 2}')
NUM_REQUESTS = 40


class SeenScheduler(Scheduler):
    threads: set[str]

    def choose(self, *args: Any, **options: Any) -> ChosenRows | None:
        self.threads.add(threading.current_thread().name)
        return super().choose(*args, **options)


def new_request(request_id: int, prompt_tokens: int, max_tokens: int, grammar: Grammar | None) -> NewRequest:
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar)
    prompt = pack_tokens(range(request_id, request_id + prompt_tokens))
    return NewRequest(id=request_id, prompt=prompt, params=params, end_token_ids=(END,), arrival=1.0)


def answers(threads: set[str], runner: FakeRunner, **facts: int) -> dict[int, list[int]]:
    """Half of the requests have a grammar."""
    scheduler = SeenScheduler(
        SchedulerSettings(num_blocks=1024, block_size=4, max_running=NUM_REQUESTS, token_budget=2048),
        waiting_shapes(NUM_REQUESTS, 2048, 4) if runner.draws_ahead else None,
    )
    scheduler.threads = threads
    tokenizer = build_stand_in({"vocab_size": VOCAB, "eos_token_id": END})
    constrained = ConstrainedRequests(Grammars(lambda: GrammarEnvironment(tokenizer, VOCAB, 4)))
    requests = [new_request(number, 5 + number, 40, SCHEMA if number % 2 else None) for number in range(NUM_REQUESTS)]
    # The first request has the grammar compiled: the others start together.
    channel = FakeChannel([new_request(NUM_REQUESTS, 5, 1, SCHEMA)], requests)
    own = RunnerFacts(**facts, takes_forced=True)
    run_engine(Engine(scheduler, runner, FakeDevice(), channel, facts=own, parts=EngineParts(constrained=constrained)))
    assert runner.order.count("forward") * 2 == len(runner.order)
    assert not any(finish.message for _, message in channel.sent for finish in message.finished)
    tokens = channel.tokens
    assert len(tokens.pop(NUM_REQUESTS)) == 1
    return tokens


def test_planning_beside_masks_changes_no_answer() -> None:
    beside, before = set[str](), set[str]()
    found = answers(beside, FakeRunner(VOCAB), max_jump_rows=0)
    ahead = FakeRunner(VOCAB, draws_ahead=True)
    assert found == answers(set(), ahead, max_jump_rows=0)
    assert ahead.order.count("draw ahead") > 20
    assert found == answers(before, FakeRunner(VOCAB), max_jump_rows=1000, min_jump=1000)
    assert any(name.startswith("plan") for name in beside)
    assert not any(name.startswith("plan") for name in before)
    assert len(found) == NUM_REQUESTS
    for number in range(1, NUM_REQUESTS, 2):
        text = bytes(token for token in found[number] if token < 256).decode()
        assert text.startswith('["'), text


class FakeMasks:
    """Every token is allowed. The masks of step `fail_at` cannot be computed."""

    def __init__(self, fail_at: int = 0) -> None:
        self.fail_at, self.num_calls = fail_at, 0

    def consume(self, outcome: StepOutcome) -> None: ...

    def masks(self, rows: MaskedRows, bits: Uint32s) -> Masks:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise ValueError("no masks")
        bits[:] = ALL_TOKENS
        return rows.masks(bits)

    def forced(self, rows: MaskedRows, masks: Masks) -> list[tuple[int, list[int]]]:
        return []


class Recorder:
    """The listener of a cycle."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_launched(self, plan: StepPlan, now: float) -> None: ...

    def on_tokens(self, done: Confirmed) -> None:
        self.tokens += done.outcome.tokens.tolist()

    def on_step_done(self, done: Confirmed) -> None: ...

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None: ...


def waiting_cycle(runner: FakeRunner, masks: FakeMasks) -> tuple[Cycle, Recorder]:
    """A cycle after the launch of its first step. The next step's draw is queued before its masks are known."""
    settings = SchedulerSettings(num_blocks=64, block_size=4, max_running=2, token_budget=64)
    scheduler, recorder = Scheduler(settings, waiting_shapes(2, 64, 4)), Recorder()
    scheduler.submit(Request(id=1, prompt=np.arange(5, dtype=np.int32), max_tokens=6, constrained=True))
    facts = RunnerFacts(max_jump_rows=0)
    cycle = Cycle(scheduler, runner, recorder, facts=facts, clock=FakeClock(), probe=lambda: None, masks=masks)
    assert cycle.advance()
    assert runner.order == ["forward", "draw"]
    return cycle, recorder


def test_masks_that_fail_still_let_the_device_draw() -> None:
    """What is queued behind them would wait for ever."""
    runner = FakeRunner(VOCAB, draws_ahead=True)
    cycle, recorder = waiting_cycle(runner, FakeMasks(fail_at=2))
    with pytest.raises(ValueError, match="no masks") as failure:
        cycle.advance()
    assert runner.order[2:] == ["forward", "draw ahead"]
    assert runner.has_masks.is_set()
    assert cycle.recover(failure.value) is None
    while cycle.advance():
        pass
    assert len(recorder.tokens) == 6


def test_a_draw_that_fails_while_it_is_queued_lets_the_device_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(VOCAB, draws_ahead=True)
    cycle, _ = waiting_cycle(runner, FakeMasks())

    def fail(plan: StepPlan, inputs: StepInputs) -> None:
        raise ValueError("no draw")

    monkeypatch.setattr(runner, "draw_ahead", fail)
    with pytest.raises(ValueError, match="no draw"):
        cycle.advance()
    assert not runner.has_masks.is_set()
    cycle.close()
    assert runner.has_masks.is_set()


def test_an_engine_that_ends_lets_the_device_draw() -> None:
    """Ending waits for the device, which would wait for masks."""
    runner = FakeRunner(VOCAB, draws_ahead=True)
    cycle, _ = waiting_cycle(runner, FakeMasks())
    assert cycle.advance()
    assert runner.order[2:] == ["forward", "draw ahead"] * 2
    assert not runner.has_masks.is_set(), "those of the last step are not computed yet"
    cycle.close()
    assert runner.has_masks.is_set()
