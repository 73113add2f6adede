"""Large batches plan the next step while masks are computed: the answers are the same."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance")

from millrace.engine import loop as loop_module
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.cycle import Cycle, Launched, Times
from millrace.engine.grammars import Grammars
from millrace.engine.loop import Engine
from millrace.link.messages import NewRequest, StepTokens, ToEngine, ToFront, pack_tokens, unpack_tokens
from millrace.params import Grammar, SamplingParams
from millrace.plan.scheduler import Scheduler
from millrace.plan.step import StepPlan
from millrace.run.runner import StepResult
from millrace.run.sampling.masks import Masks, Uint32s, allowed_tokens, new_masks
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.stand_in import build_stand_in

END, VOCAB = 299, 300
SCHEMA = Grammar("json_schema", '{"type": "array", "items": {"enum": ["left", "right", "none"]}, "minItems": 2}')
NUM_REQUESTS = 40
NONE = np.zeros(0, np.int64)


class Channel:
    num_fronts = 1

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> list[ToEngine]:
        return []

    def send(self, front_index: int, message: ToFront) -> None:
        if isinstance(message, StepTokens):
            ids = np.frombuffer(message.ids, np.int64).tolist()
            for request_id, token in zip(ids, unpack_tokens(message.tokens).tolist(), strict=True):
                self.tokens.setdefault(request_id, []).append(token)

    def send_all(self, message: ToFront) -> None:
        self.send(0, message)

    def close(self) -> None: ...


class Runner:
    """Draws an allowed token that depends on the row's position."""

    is_warm, num_cold, padded_tokens = True, 0, 0

    def __init__(self) -> None:
        self.order: list[str] = []

    def forward(self, plan: StepPlan) -> None:
        self.order.append("forward")

    def guide_drafts(self, guide: Any) -> None: ...

    def mask_memory(self, count: int) -> Uint32s:
        return new_masks(count, VOCAB)

    def draw(self, plan: StepPlan, masks: Masks | None) -> Any:
        self.order.append("draw")
        positions = (plan.starts + plan.counts)[plan.samples]
        drawn = positions % 7
        if masks is not None:
            for index, allowed in zip(masks.index.tolist(), allowed_tokens(masks, VOCAB), strict=True):
                choices = np.flatnonzero(allowed)
                drawn[index] = choices[int(positions[index]) * 5 % len(choices)]
        result = StepResult(plan.step_no, torch.from_numpy(drawn), None, NONE, NONE.astype(np.int32), ())
        return SimpleNamespace(wait=lambda: result)

    def draw_ahead(self, plan: StepPlan, masks: Masks) -> Any:
        return None

    def masks_ready(self) -> None:
        pass


class AheadRunner(Runner):
    """Its draws are queued before their masks are known."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.num_ahead = threading.Event(), 0

    def mask_memory(self, count: int) -> Uint32s:
        self.ready = threading.Event()
        masks = super().mask_memory(count)
        masks[:] = 0  # Nothing can be drawn before they are ready.
        return masks

    def draw_ahead(self, plan: StepPlan, masks: Masks) -> Any:
        self.num_ahead += 1
        ready = self.ready

        def wait() -> StepResult:
            assert ready.is_set()
            found: StepResult = self.draw(plan, masks).wait()
            return found

        return SimpleNamespace(wait=wait)

    def masks_ready(self) -> None:
        self.ready.set()


class SeenScheduler(Scheduler):
    threads: set[str]

    def plan(self, *args: Any, **options: Any) -> StepPlan | None:
        self.threads.add(threading.current_thread().name)
        return super().plan(*args, **options)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end


def answers(threads: set[str], runner: Any = None) -> dict[int, list[int]]:
    """Half of the requests have a grammar."""
    runner = runner or Runner()
    scheduler = SeenScheduler(num_blocks=1024, block_size=4, max_running=NUM_REQUESTS, token_budget=2048)
    scheduler.threads = threads
    tokenizer = build_stand_in({"vocab_size": VOCAB, "eos_token_id": END})
    grammars = Grammars(lambda: GrammarEnvironment(tokenizer, VOCAB, 4))
    constrained, channel = ConstrainedRequests(grammars), Channel()
    device: Any = SimpleNamespace(kind="cuda", poll_s=0.0, probe=lambda: None)
    engine = Engine(scheduler, runner, device, channel, constrained=constrained)
    for number in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=40, grammar=SCHEMA if number % 2 else None)
        prompt = pack_tokens(range(number, number + 5 + number))
        engine._handle(NewRequest(id=number, prompt=prompt, params=params, end_token_ids=(END,), arrival=1.0))
    until(lambda: len(grammars._compiled) == NUM_REQUESTS // 2)
    for request in constrained.take_ready(0.0):
        scheduler.submit(request)
    while engine._cycle.advance():
        grammars.take_ready(0.0)
    assert grammars.take_failed() == []
    constrained.shut_down()
    assert runner.order.count("draw") == runner.order.count("forward")
    return channel.tokens


def test_planning_beside_masks_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, before = set[str](), set[str]()
    monkeypatch.setattr(loop_module, "CUDA_MAX_JUMP_ROWS", 0)
    found = answers(beside)
    monkeypatch.setattr(loop_module, "CUDA_MAX_JUMP_ROWS", 1000)
    monkeypatch.setattr(loop_module, "CUDA_MIN_JUMP", 1000)
    assert found == answers(before)
    monkeypatch.setattr(loop_module, "CUDA_MAX_JUMP_ROWS", 0)
    ahead = AheadRunner()
    assert found == answers(set(), ahead)
    assert ahead.num_ahead > 20
    assert any(name.startswith("plan") for name in beside)
    assert not any(name.startswith("plan") for name in before)
    assert len(found) == NUM_REQUESTS
    for number in range(1, NUM_REQUESTS, 2):
        text = bytes(token for token in found[number] if token < 256).decode()
        assert text.startswith('["'), text


def test_masks_that_fail_still_let_the_device_draw() -> None:
    """What is queued behind them would wait for ever."""
    runner = AheadRunner()

    def fail(rows: Any, bits: Any) -> Masks:
        raise ValueError("no masks")

    cycle = waiting_cycle(runner, SimpleNamespace(masks=fail))
    assert cycle._needs_masks
    with pytest.raises(ValueError, match="no masks"):
        cycle._draw_and_launch_next(cycle._launched[0])
    assert runner.ready.is_set()
    assert not cycle._needs_masks


def test_a_draw_that_fails_while_it_is_queued_lets_the_device_go_on() -> None:
    runner = AheadRunner()

    def fail(plan: Any, masks: Any) -> Any:
        raise ValueError("no draw")

    runner.draw_ahead = fail  # type: ignore[method-assign]
    cycle: Any = Cycle.__new__(Cycle)
    with pytest.raises(ValueError, match="no draw"):
        waiting_cycle(runner, None, cycle)
    assert not runner.ready.is_set()
    cycle.close()
    assert runner.ready.is_set()


def test_an_engine_that_ends_lets_the_device_draw() -> None:
    """Ending waits for the device, which would wait for masks."""
    runner = AheadRunner()
    cycle = waiting_cycle(runner, None)
    assert not runner.ready.is_set()
    cycle.close()
    assert runner.ready.is_set()


def waiting_cycle(runner: AheadRunner, masks: Any, cycle: Any = None) -> Any:
    """A cycle in which the draw of one step waits for masks."""
    cycle = cycle or Cycle.__new__(Cycle)
    cycle._runner, cycle._masks, cycle._clock, cycle.times = runner, masks, time.monotonic, Times()
    cycle._masked_rows = lambda plan, ids: SimpleNamespace(num_masks=1, masks=lambda bits: SimpleNamespace(bits=bits))
    launched = Launched(SimpleNamespace(rows=[0]), 0.0, NONE)  # type: ignore[arg-type]
    cycle._launched = deque([launched])
    cycle._queue_draw(launched)
    return cycle
