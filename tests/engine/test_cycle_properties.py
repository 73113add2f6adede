"""The real cycle over a toy device, for random schedules: every request gets the tokens of a lone run.

Grammars restrict some rows, and their masks come late: after the tokens of the step before, while the next forward pass
is queued. Others have drafts. There are one or several KV groups, copies that take several turns and fail, shapes with
graphs, cancellations, and a request that makes its steps fail.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.fake_runner import FakeRunner, step_result
from helpers.suite import examples
from helpers.toy_device import ToyDevice, allowed_tokens, digest, lone_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.engine.cycle import Confirmed, Cycle
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.shapes.declared import DeclaredShapes, OwnSizes
from millrace.plan.step import BlockCopies, CapturePlan, Ended, StepInputs, StepOutcome, StepPlan, StepShape
from millrace.run.facts import RunnerFacts
from millrace.run.protocol import StepResult
from millrace.run.sampling.masks import MaskedRows, Masks
from millrace.run.shapes.padded import PaddedShapes
from millrace.run.shapes.table import ShapeFacts

VOCAB = 11


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Steps and copies fail by the hundred."""
    caplog.set_level(logging.CRITICAL, "millrace")


class ToyGrammars:
    """Masks of the constrained requests, from the tokens that the host knows."""

    def __init__(self) -> None:
        self.states: dict[int, int] = {}
        self.num_masks = self.num_drafted = 0

    def open(self, request: Request) -> None:
        self.states[request.id] = _state(request.prompt.tolist())

    def consume(self, outcome: StepOutcome) -> None:
        for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
            if request_id in self.states:
                self.states[request_id] = digest(self.states[request_id], token)

    def masks(self, rows: MaskedRows, bits: Any = None) -> Masks:
        self.num_masks += rows.num_masks
        self.num_drafted += rows.num_masks - len(rows.index)
        words = []
        for one, drafts in zip(rows.request_ids.tolist(), rows.drafts, strict=True):
            state = self.states[one]
            for place in range(1 + len(drafts)):
                words.append(sum(1 << token for token in allowed_tokens(state, VOCAB)))
                state = digest(state, drafts[place]) if place < len(drafts) else state
        found = np.empty((len(words), 1), np.uint32) if bits is None else bits
        found[:, 0] = words
        return rows.masks(found)

    def forced(self, rows: MaskedRows, masks: Masks) -> list[tuple[int, list[int]]]:
        return [(one, list(self._forced(self.states[one]))) for one in rows.request_ids.tolist()]

    def _forced(self, state: int) -> Iterator[int]:
        for _ in range(20):
            allowed = allowed_tokens(state, VOCAB)
            if len(allowed) > 1:
                return
            yield allowed[0]
            state = digest(state, allowed[0])


def _state(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = digest(state, token)
    return state


class ToyRunner(FakeRunner):
    """Runs steps on the toy device when somebody waits for them, in order."""

    def __init__(self, device: ToyDevice, rng: random.Random, shapes: DeclaredShapes) -> None:
        super().__init__(VOCAB)
        self.device, self.rng, self.shapes = device, rng, shapes
        self.forwarded: StepPlan | None = None
        self.proposed: dict[int, list[int]] = {}
        """Of masked rows, by index in the plan."""
        self.queued: list[ToyStep] = []
        self.captured: set[object] = set()
        self.max_polls, self.failures = rng.choice([1, 4, 20]), rng.choice([0.0, 0.3])

    def drafts(self) -> tuple[np.ndarray, ...]:
        """Known when the step before has been run."""
        assert self.forwarded is not None
        while self.queued:
            self.queued.pop(0).run()
        plan = self.forwarded
        self.proposed = self.device.propose(plan)
        drawing = np.flatnonzero(plan.samples).tolist()
        return tuple(np.array(self.proposed.get(index, []), np.int32) for index in drawing)

    def forward(self, plan: StepPlan, given: tuple[np.ndarray, ...] | None = None) -> None:
        assert self.forwarded is None, "the draw of the step before is missing"
        self.forwarded, self.proposed = plan, {}
        self.check_shape(plan)

    def check_shape(self, plan: StepPlan) -> None:
        shape = plan.shape
        places = 0 if plan.draft_places is None or not shape.places else int(plan.draft_places.max())
        assert shape.tokens >= plan.num_tokens
        assert shape.rows >= len(plan.rows)
        assert not shape.places or shape.places > places or shape.rows * 2 * shape.places > self.device_rows
        assert shape.kind != "decode" or plan.num_tokens == len(plan.rows)
        self.check_heads(plan)
        assert not self.captured & set(plan.captures)
        self.captured.update(plan.captures)
        if shape in plan.captures:
            assert shape.kind != "exact"

    def check_heads(self, plan: StepPlan) -> None:
        if isinstance(self.shapes, OwnSizes):
            assert not plan.draw.heads
            return
        states = int(plan.samples.sum()) * plan.shape.tokens_per_row
        assert sum(head.states for head in plan.draw.heads) >= states
        assert plan.masked is None or plan.draw.full
        assert set(plan.captures) <= {plan.shape, *plan.draw.heads}
        assert not plan.draw.waits or (plan.masked is not None and self.captured.issuperset(plan.draw.heads))

    @property
    def device_rows(self) -> int:
        return len(self.device.tables)

    def draw(self, plan: StepPlan, inputs: StepInputs | None = None) -> ToyStep:
        masks = None if inputs is None else inputs.masks
        assert self.forwarded is plan
        self.forwarded = None
        assert (masks is None) == (plan.masked is None)
        self.queued.append(ToyStep(self, plan, masks, self.proposed))
        return self.queued[-1]

    def draw_ahead(self, plan: StepPlan, inputs: StepInputs) -> ToyStep | None:
        """Of every other step. It runs when somebody waits for it, after `masks_ready`."""
        return self.draw(plan, inputs) if plan.step_no % 2 else None

    def copy(self, copies: BlockCopies) -> ToyCopy:
        self.device.begin_copies(copies)
        return ToyCopy(self.device, copies, self.rng.randrange(self.max_polls), self.rng.random() < self.failures)

    def capture(self, plan: CapturePlan) -> bool:
        assert plan.shape not in self.captured
        self.captured.add(plan.shape)
        return True


class ToyStep:
    def __init__(self, runner: ToyRunner, plan: StepPlan, masks: Masks | None, drafts: dict[int, list[int]]) -> None:
        self.runner, self.plan, self.masks, self.drafts = runner, plan, masks, drafts
        self.result: tuple[np.ndarray, np.ndarray | None] | None = None

    def run(self) -> None:
        allowed = None
        if self.masks is not None:
            due = np.flatnonzero(self.plan.samples)
            assert self.plan.masked is not None
            assert np.unique(due[self.masks.index]).tolist() == np.flatnonzero(self.plan.masked).tolist()
            allowed = {}
            for index, word in zip(due[self.masks.index].tolist(), self.masks.bits[:, 0].tolist(), strict=True):
                allowed.setdefault(index, []).append([token for token in range(VOCAB) if word >> token & 1])
        self.result = self.runner.device.run(self.plan, allowed, self.drafts)

    def wait(self) -> StepResult:
        while self.result is None:
            self.runner.queued.pop(0).run()
        tokens, counts = self.result
        return step_result(self.plan, tokens, counts=counts)

    def done(self) -> bool:
        return self.result is not None


class ToyCopy:
    def __init__(self, device: ToyDevice, copies: BlockCopies, polls: int, failed: bool) -> None:
        self.device, self.copies, self.polls, self.failed = device, copies, polls, failed

    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> float:
        self.device.end_copies(self.copies, self.failed)
        if self.failed:
            raise RuntimeError("the copy failed")
        return 0.001


class World:
    """Also the cycle's listener."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        windows = rng.choice([(None,), (None, 5), (9, None, 4)])
        max_running, num_blocks, block_size = rng.randrange(1, 7), rng.choice([24, 60]), rng.choice([1, 3, 8])
        budget = rng.choice([2, max_running + 3, 40])
        self.device = ToyDevice(num_blocks, block_size, max_running, VOCAB, windows, seed=rng.randrange(1000))
        facts = ShapeFacts(max_running, budget, 4, block_size, has_drafts=True, can_capture=True, min_split=2)
        facts = replace(facts, greedy_heads=(2, 4), waits_above=(None, 0, 3)[seed % 3])
        self.runner = ToyRunner(self.device, rng, rng.choice([OwnSizes(), PaddedShapes(facts)]))
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=num_blocks,
                block_size=block_size,
                max_running=max_running,
                token_budget=budget,
                expected_output=1.0,
                groups=KvGroups(windows),
                drafts=DraftSettings(rng.choice([0, 3]), max_places=max_running),
                host_tier=HostTierSettings(rng.choice([0, 20]), block_bytes=1, batch_bytes=3),
            ),
            shapes=ShapeChoice(self.runner.shapes),
        )
        self.grammars, self.now = ToyGrammars(), 0.0
        self.cycle = Cycle(
            self.scheduler,
            self.runner,
            self,
            facts=RunnerFacts(
                rng.choice([1, 2, 2, 3]),
                max_jump_rows=rng.choice([0, 4, sys.maxsize]),
                takes_forced=rng.choice([True, False]),
            ),
            clock=self.clock,
            probe=lambda: None,
            masks=self.grammars,
        )
        self.capacity = (num_blocks // len(windows) - 1) * block_size
        self.share_constrained = rng.choice([0.0, 0.5, 1.0])
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.device.ended = self.ended
        self.shared = [rng.randrange(VOCAB) for _ in range(30)]
        self.num_undrawn = self.num_failed = 0

    def clock(self) -> float:
        self.now += 1e-4
        return self.now

    def on_launched(self, plan: StepPlan, now: float) -> None:
        self.num_undrawn += self.runner.forwarded is not None
        # The very objects that the scheduler made, which it shows nobody.
        planned = self.scheduler._in_flight._plans
        assert any(plan is one for one in planned), "a plan is made once, by the scheduler"

    def on_tokens(self, done: Confirmed) -> None:
        outcome = done.outcome
        for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
            assert request_id not in self.ended
            self.outputs[request_id].append(token)
        self.on_ended(outcome.ended, done.at)

    def on_step_done(self, done: Confirmed) -> None:
        self.scheduler.pool.check()

    def on_ended(self, ended: tuple[Ended, ...], now: float) -> None:
        for event in ended:
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event.reason

    def submit(self) -> None:
        rng, request_id = self.rng, len(self.requests)
        shared = self.shared[: rng.randrange(30)] if rng.random() < 0.6 else []
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        if len(prompt) >= self.capacity:
            return
        request = Request(
            id=request_id,
            prompt=np.asarray(prompt, np.int32),
            max_tokens=rng.randrange(1, min(self.capacity - len(prompt), 30) + 1),
            end_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 1]))),
            constrained=rng.random() < self.share_constrained,
        )
        self.requests[request_id], self.outputs[request_id] = request, []
        if request.constrained:
            self.grammars.open(request)
        self.scheduler.submit(request)

    def advance(self) -> None:
        try:
            if not self.cycle.advance() and self.runner.shapes.can_capture:
                self.cycle.warm_next()
        except RuntimeError as error:
            self.num_failed += 1
            self.runner.queued.clear()
            self.runner.forwarded = None
            culprit = self.cycle.recover(error)
            if culprit is not None:
                assert culprit.request_id in self.device.fail_on
                self.scheduler.abort(culprit.request_id, "error", "poison")

    def run(self) -> None:
        if self.rng.random() < 0.2:
            self.device.fail_on = {self.rng.randrange(8)}
        for _ in range(self.rng.randrange(5, 30)):
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                self.submit()
            alive = [one for one in self.requests if one not in self.ended]
            if alive and self.rng.random() < 0.05:
                self.scheduler.abort(self.rng.choice(alive))
            self.advance()
        for _ in range(20_000):
            if not self.scheduler.has_work and not self.cycle.num_launched:
                return
            self.advance()
        raise AssertionError("starved")

    def check_end(self) -> None:
        assert set(self.ended) == set(self.requests)
        for request_id, request in self.requests.items():
            expected, reason = lone_run(
                request.prompt.tolist(), request.max_tokens, request.end_token_ids, 0, VOCAB, request.constrained
            )
            if self.ended[request_id] in ("stop", "length"):
                assert (self.outputs[request_id], self.ended[request_id]) == (expected, reason)
            else:
                assert self.ended[request_id] == "abort" or request_id in self.device.fail_on
                assert self.outputs[request_id] == expected[: len(self.outputs[request_id])]


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_every_request_gets_the_tokens_of_a_lone_run(seed: int) -> None:
    world = World(seed)
    world.run()
    world.check_end()


def test_the_schedules_have_late_masks_drafts_groups_copies_failures_and_graphs() -> None:
    """The property above is only worth something if they do."""
    undrawn = masks = drafted = refused = jumped = accepted = loaded = copies_failed = failed = captured = beside = 0
    dropped = forced = 0
    for seed in range(60):
        world = World(seed)
        world.run()
        world.check_end()
        undrawn += world.num_undrawn
        masks += world.grammars.num_masks
        drafted += world.device.num_masked_accepted
        refused += world.grammars.num_drafted - world.device.num_masked_accepted
        jumped += world.cycle.num_jumped
        forced += world.device.num_forced
        accepted += world.device.num_accepted
        beside += world.device.num_accepted if world.grammars.num_masks else 0
        dropped += int(world.scheduler.rows.num_dropped.sum())
        failed += world.num_failed
        captured += sum(isinstance(shape, StepShape) for shape in world.runner.captured)
        if world.scheduler.tiers.host is not None:
            loaded += world.scheduler.tiers.host.tokens_loaded
            copies_failed += world.scheduler.tiers.host.copies_failed
    found = {
        "draws that waited for masks": undrawn,
        "masks": masks,
        "drafts under a grammar": drafted,
        "drafts under a grammar that were wrong": refused,
        "jumps": jumped,
        "forced drafts": forced,
        "drafts": accepted,
        "drafts beside masks": beside,
        "blocks behind windows": dropped,
        "tokens loaded": loaded,
        "copies that failed": copies_failed,
        "steps that failed": failed,
        "graphs": captured,
    }
    assert all(count > 5 for count in found.values()), found
