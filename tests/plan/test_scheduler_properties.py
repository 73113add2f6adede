"""Properties that hold for hundreds of random schedules with cancellations, deadlines and failures.

- every request ends exactly once, with the tokens that it gets when it runs alone
- the pool equation holds at every step; no block leaks or is released twice
- no request starves
"""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from helpers.suite import FUZZ
from helpers.toy_device import ToyDevice, lone_run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.params import Retain
from millrace.plan.budget import StepTarget
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.disk_tier import DiskTierSettings
from millrace.plan.kv.eviction import EvictionSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.kv.retention import RetentionSettings
from millrace.plan.pacing.step_time import StepRates
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import BlockCopies, StepPlan

VOCAB = 11


class World:
    """A scheduler, a toy device that lags up to `depth` steps behind it, and a record of all requests."""

    def __init__(
        self,
        rng: random.Random,
        depth: int,
        windows: tuple[int | None, ...] = (None,),
        max_drafts: int = 0,
        host_slots: int = 0,
        disk_slots: int = 0,
        state_slots: int | None = None,
        **limits: int,
    ) -> None:
        self.rng, self.depth = rng, depth
        # A low expected output length admits too many requests, which leads to preemptions.
        expected_output = rng.choice([1.0, 1.0, 512.0])
        self.scheduler = Scheduler(
            SchedulerSettings(
                **limits,
                prefix_cache=rng.random() < 0.8,
                expected_output=expected_output,
                policy=rng.choice(["fcfs", "shortest", "feedback", "deadline"]),
                aging_s=rng.choice([2.0, 30.0]),
                groups=KvGroups(windows),
                drafts=DraftSettings(max_drafts, max_places=rng.choice([8, 1000])),
                target=rng.choice([None, StepTarget(0.1, StepRates(0.01, 0.02, 0.03, 1e-3, 1e-4))]),
                eviction=EvictionSettings(rng.choice(["lru", "frequency", "cost"]), rng.choice([0.0, 0.5])),
                retention=RetentionSettings(rng.choice([0, 4, 10]), 1),
                state_slots=state_slots,
                disk_tier=DiskTierSettings(disk_slots if host_slots else 0),
                host_tier=HostTierSettings(host_slots, block_bytes=1, batch_bytes=rng.choice([1, 3, 100])),
            )
        )
        sizes = (limits["num_blocks"], limits["block_size"], limits["max_running"])
        self.device = ToyDevice(*sizes, VOCAB, windows, rng.randrange(1000), state_slots is not None)
        self.capacity = (limits["num_blocks"] // len(windows) - 1) * limits["block_size"]
        self.launched: deque = deque()
        self.copies: list[tuple[BlockCopies, float]] = []
        """Copies in flight, with the times at which they end."""
        self.max_copy_steps, self.copy_failures = rng.choice([1, 3, 6, 30]), rng.choice([0.0, 0.0, 0.2])
        self.last_plan: StepPlan | None = None
        self.jumps = rng.choice([0.0, 0.0, 0.2, 0.8])
        self.num_repeated = self.num_jumped = 0
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.now = 0.0
        self.shared_prompt = [rng.randrange(VOCAB) for _ in range(40)]

    def submit(self) -> None:
        rng, request_id = self.rng, len(self.requests)
        shared = self.shared_prompt[: rng.randrange(0, 30)] if rng.random() < 0.6 else []
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        room = self.capacity - len(prompt)
        if room < 1:
            return
        max_tokens = rng.randrange(1, min(room, 40) + 1)
        request = Request(
            id=request_id,
            prompt=np.asarray(prompt, np.int32),
            max_tokens=max_tokens,
            end_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 1, 6]))),
            min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.3 else 0,
            priority=rng.randrange(3),
            tenant=rng.choice(["", "a", "b"]),
            weight=rng.choice([0.5, 1.0, 4.0]),
            arrival=self.now,
            salt=b"" if rng.random() < 0.8 else b"other",
            deadline=self.now + rng.randrange(1, 60) if rng.random() < 0.1 else math.inf,
            can_draft=rng.random() < 0.8,
            read_cache=rng.random() < 0.9,
            retain=self.handle() if rng.random() < 0.2 else None,
        )
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.submit(request)

    def handle(self) -> Retain:
        rng = self.rng
        ttl_s, name = float(rng.randrange(1, 40)), rng.choice(["", "a", "b"])
        return Retain(ttl_s, name, rng.choice([0, 5, 12]), rng.choice([0, 3]), rng.random() < 0.5)

    def drop_handle(self) -> None:
        self.scheduler.drop_handles(self.rng.choice(["a", "b"]), self.rng.choice([None, "", "a"]))

    def cancel(self) -> None:
        alive = [request_id for request_id in self.requests if request_id not in self.ended]
        if alive:
            victim = self.rng.choice(alive)
            self.cancelled.add(victim)
            assert self.scheduler.abort(victim)
            self.collect(self.scheduler.take_ended())
            assert not self.scheduler.abort(victim)

    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.collect(self.scheduler.take_ended())
        self.maybe_prepare_outcome()
        if plan is not None:
            caught_up = int(plan.counts[plan.counts > 1].sum())
            assert caught_up <= self.scheduler.budget.token_budget
            assert plan.num_tokens - caught_up <= self.scheduler.rows.capacity
            self.check_repeated(plan)
            self.launched.append(plan)
            if self.rng.random() < self.jumps:
                self.jump(plan)
        while self.launched and (plan is None or len(self.launched) > self.depth):
            self.complete()
            plan = self.launched[0] if self.launched else plan
            if plan is None:
                break
            if len(self.launched) <= self.depth:
                break
        self.copy_blocks()
        self.check_pools()

    def jump(self, plan: StepPlan) -> None:
        """Some rows of the step launched last are told what they will draw, as a grammar does."""
        for request_id in self.scheduler.rows.request_ids[plan.rows[plan.samples]].tolist():
            if self.rng.random() < 0.7:
                request, num_output = self.requests[request_id], len(self.outputs[request_id])
                limits = (request.max_tokens, request.end_token_ids, request.min_tokens)
                forced = lone_run(request.prompt.tolist(), *limits, VOCAB)[0][num_output:]
                self.num_jumped += self.scheduler.append_forced(request_id, forced[: self.rng.randrange(8)])

    def copy_blocks(self) -> None:
        """Begin new copies and end those that are due, in any order."""
        for copies in self.scheduler.take_copies():
            self.device.begin_copies(copies)
            self.copies.append((copies, self.now + self.rng.randrange(1, self.max_copy_steps + 1)))
        due = [copies for copies, ends in self.copies if ends <= self.now]
        self.copies = [(copies, ends) for copies, ends in self.copies if ends > self.now]
        self.rng.shuffle(due)
        for copies in due:
            failed = self.rng.random() < self.copy_failures
            self.device.end_copies(copies, failed)
            self.scheduler.copies_done(copies, failed)

    def check_pools(self) -> None:
        self.scheduler.pool.check()
        self.scheduler.retention.check()
        if self.scheduler.tiers.host is not None:
            self.scheduler.tiers.host.index.check()
        if self.scheduler.tiers.disk is not None:
            self.scheduler.tiers.disk.check()
        if self.scheduler.prefix.checkpoints is not None:
            self.scheduler.prefix.checkpoints.slots.check()

    def check_repeated(self, plan: StepPlan) -> None:
        before, self.last_plan = self.last_plan, plan
        assert before is None or plan.epoch >= before.epoch
        if before is not None and plan.repeats(before.epoch):
            self.num_repeated += 1
            assert plan.rows.tolist() == before.rows.tolist()
            assert plan.starts.tolist() == (before.starts + 1).tolist()
            assert set(plan.counts.tolist()) == set(before.counts.tolist()) == {1}
            assert plan.num_tokens == len(plan.rows)
            assert plan.samples.all()
            assert before.samples.all()
            assert not plan.admitted
            assert not plan.released

    def complete(self) -> None:
        plan = self.launched.popleft()
        tokens, counts = self.device.run(plan)
        self.maybe_prepare_outcome()
        # The deferred work may run at once or in the next call that needs it.
        apply = self.rng.choice([self.scheduler.apply, self.scheduler.confirm])
        outcome = apply(plan.step_no, tokens, counts)
        for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
            assert request_id not in self.ended, "a token after the terminal event"
            self.outputs[request_id].append(token)
        self.scheduler.observe_step(plan, self.rng.uniform(0.01, 0.3))
        self.collect(outcome.ended)

    def maybe_prepare_outcome(self) -> None:
        """At any time: a pending outcome that becomes invalid must be discarded."""
        if self.rng.random() < 0.5:
            self.scheduler.prepare_outcome()

    def collect(self, ended) -> None:
        for event in ended:
            assert event.request_id not in self.ended, "two terminal events"
            self.ended[event.request_id] = event.reason

    def drain(self, limit: int) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.launched:
                return
            self.step()
        pytest.fail(f"starved: {len(self.requests) - len(self.ended)} requests never ended")

    def check_end(self) -> None:
        while self.launched:
            self.complete()
        assert set(self.ended) == set(self.requests)
        for request_id, request in self.requests.items():
            expected, reason = lone_run(
                request.prompt.tolist(), request.max_tokens, request.end_token_ids, request.min_tokens, VOCAB
            )
            if self.ended[request_id] in ("stop", "length"):
                assert (self.outputs[request_id], self.ended[request_id]) == (expected, reason)
            else:
                assert self.ended[request_id] in ("abort", "deadline")
                assert self.outputs[request_id] == expected[: len(self.outputs[request_id])]
        self.scheduler.run_deferred()
        while self.copies or self.scheduler.num_copies:
            self.step()
        pool, checkpoints = self.scheduler.pool, self.scheduler.prefix.checkpoints
        assert checkpoints is None or not (checkpoints._rows or checkpoints._expected or checkpoints._saves)
        # A leak of tenants would show only after many more of them.
        assert not self.scheduler.shares._shares, "a tenant still counts as active"
        assert self.scheduler.waiting.num_by_class == [0, 0, 0]
        assert self.scheduler.waiting.tokens.by_class() == self.scheduler.prefill_tokens() == (0, 0, 0)
        assert pool.num_in_use == 0
        assert pool.num_fenced == 0
        assert pool.num_held == 0
        assert self.scheduler.rows.num_free == self.scheduler.rows.capacity


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    max_running = rng.randrange(1, 7)
    windows = rng.choice([(None,), (None,), (None, 5), (7,), (9, None, 4, None)])
    return World(
        rng,
        depth=rng.choice([0, 1, 1, 2]),
        windows=windows,
        state_slots=rng.choice([None, 0, 1, 3, 20]) if windows == (None,) else None,
        max_drafts=rng.choice([0, 0, 1, 3]),
        host_slots=rng.choice([0, 0, 3, 20, 100]),
        disk_slots=(0, 12, 200)[seed % 3],
        num_blocks=rng.choice([12, 16, 24, 60]),
        block_size=rng.choice([1, 3, 4, 8]),
        max_running=max_running,
        token_budget=rng.choice([1, 2, max_running, max_running + 3, 40]),
        mixed_budget=rng.choice([0, 4]),
    )


@settings(max_examples=400 if FUZZ else 120, deadline=None)
@given(st.integers(0, 2**32))
def test_every_request_ends_once_with_its_own_tokens(seed: int) -> None:
    world = random_world(seed)
    for _ in range(world.rng.randrange(5, 40)):
        for _ in range(world.rng.choice([0, 0, 1, 3])):
            world.submit()
        if world.rng.random() < 0.1:
            world.cancel()
        if world.rng.random() < 0.1:
            world.drop_handle()
        world.step()
    world.drain(20_000)
    world.check_end()


def test_the_random_schedules_do_preempt_share_cancel_repeat_and_load() -> None:
    """The property above is only worth something if the schedules exercise these features."""
    preemptions = hits = cancelled = repeated = accepted = dropped = loaded = failed = lost = jumped = retained = (
        unkept
    ) = begun = evicted = read = unreadable = 0
    for seed in range(60):
        world = random_world(seed)
        for _ in range(20):
            world.submit()
            world.step()
            if world.rng.random() < 0.1:
                world.cancel()
        world.drain(20_000)
        preemptions += world.scheduler.num_preemptions
        hits += world.scheduler.prefix.hit_tokens
        cancelled += len(world.cancelled)
        repeated += world.num_repeated
        jumped += world.num_jumped
        accepted += world.device.num_accepted
        dropped += int(world.scheduler.rows.num_dropped.sum())
        lost += world.scheduler.pool.num_lost
        retained += sum(request.diagnostics.retained_tokens for request in world.requests.values())
        unkept += world.scheduler.pool.num_evicted_retained
        if world.scheduler.prefix.checkpoints is not None:
            begun += world.scheduler.prefix.checkpoints.num_hits
            evicted += world.scheduler.prefix.checkpoints.slots.num_evicted
        if world.scheduler.tiers.host is not None:
            loaded += world.scheduler.tiers.host.tokens_loaded
            failed += world.scheduler.tiers.host.copies_failed
        if world.scheduler.tiers.disk is not None:
            read += world.scheduler.tiers.disk.tokens_read
            unreadable += world.scheduler.tiers.disk.reads_failed
    assert begun > 20
    assert evicted > 20
    assert retained > 100
    assert unkept > 10
    assert loaded > 100
    assert read > 10
    assert unreadable > 0
    assert failed > 10
    assert lost > 10
    assert accepted > 100
    assert jumped > 100
    assert dropped > 100
    assert preemptions > 20
    assert hits > 100
    assert cancelled > 20
    assert repeated > 100


@settings(max_examples=200 if FUZZ else 60, deadline=None)
@given(st.integers(0, 2**32))
@example(1310217)
def test_a_poison_request_fails_alone(seed: int) -> None:
    """Bisect a failed step as the engine does: halve the suspects until one is left."""
    world = random_world(seed)
    for _ in range(6):
        world.submit()
    world.device.fail_on = {world.rng.randrange(6)}
    for _ in range(5000):
        if not world.scheduler.has_work and not world.launched:
            break
        try:
            world.step()
        except RuntimeError:
            world.launched.clear()
            isolate(world, list(world.scheduler.discard_in_flight()))
    poisoned = world.device.fail_on
    assert all(world.ended[i] in ("error", "deadline") or i not in poisoned for i in world.ended)
    world.ended = {i: ("abort" if i in poisoned else reason) for i, reason in world.ended.items()}
    world.check_end()


def isolate(world: World, suspects: list[int]) -> None:
    scheduler = world.scheduler
    while suspects:
        half = suspects[: max(1, len(suspects) // 2)]
        plan = scheduler.plan(world.now, only=half)
        world.collect(scheduler.take_ended())
        if plan is None:
            suspects = suspects[len(half) :]
            continue
        world.check_repeated(plan)
        try:
            world.launched.append(plan)
            world.complete()
            suspects = suspects[len(half) :]
        except RuntimeError:
            world.launched.clear()
            scheduler.discard_in_flight()
            if len(half) == 1:
                scheduler.abort(int(scheduler.rows.request_ids[half[0]]), "error", "poison")
                world.collect(scheduler.take_ended())
                return
            suspects = half


def test_the_oldest_request_does_not_starve() -> None:
    """A stream of small requests cannot keep a large one waiting."""
    scheduler = Scheduler(SchedulerSettings(num_blocks=10, block_size=4, max_running=4, token_budget=16))
    device = ToyDevice(10, 4, 4, VOCAB)
    for index in range(3):
        scheduler.submit(Request(id=index, prompt=np.arange(3, dtype=np.int32), max_tokens=8))
    big = Request(id=1000, prompt=np.arange(24, dtype=np.int32), max_tokens=16)
    scheduler.submit(big)
    ended_at = None
    for step in range(400):
        scheduler.submit(Request(id=10 + step, prompt=np.full(4, step, np.int32), max_tokens=6))
        plan = scheduler.plan(float(step))
        if plan is not None:
            outcome = scheduler.apply(plan.step_no, *device.run(plan))
            if any(event.request_id == 1000 for event in outcome.ended):
                ended_at = step
                break
    assert ended_at is not None
    assert ended_at < 120
