"""Properties that hold for hundreds of random schedules with cancellations, deadlines and failures.

- every request ends exactly once, with the tokens that it gets when it runs alone
- the pool equation holds at every step; no block leaks or is released twice
- no request starves
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from helpers.random_world import VOCAB, World, random_world
from helpers.suite import FUZZ, SEED, examples
from helpers.toy_device import ToyDevice
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings

OPERATIONS = {
    "submit": 8,
    "cancel": 1,
    "copy_handle": 1,
    "drop_handle": 1,
    "forget": 1,
    "step": 20,
    "restart": 1,
    "export": 4,
    "import_file": 4,
}
"""How often each is drawn, by its name in `World`."""
RARE = ("restart", "copy_handle", "forget", "tokens read", "unreadable", "torn", "exported", "imported", "refused")
RARE += ("forgotten device", "forgotten host", "forgotten disk")
NUM_OPERATIONS, OPERATIONS_OF_A_WORLD = 100_000 if FUZZ else 2_000, 100


@settings(max_examples=examples(40), deadline=None)
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


def test_blocks_in_any_location_give_the_tokens_of_a_run_without_a_cache() -> None:
    """Blocks are stored, loaded, shared, forked, evicted, forgotten, and moved as files; copies fail, and processes end
    at any time."""
    done: Counter[str] = Counter()
    for seed in itertools.count(1000 * SEED):
        world = random_world(seed, has_tiers=True)
        for name in world.rng.choices([*OPERATIONS], [*OPERATIONS.values()], k=OPERATIONS_OF_A_WORLD):
            done[name] += 1
            if name == "restart":
                done += world.disk_figures()
            getattr(world, name)()
        world.drain(20_000)
        done += Counter({f"forgotten {at}": n for at, n in world.num_forgotten.items()})
        done += world.disk_figures() + world.num_moved
        world.check_end()
        if sum(done[name] for name in OPERATIONS) >= NUM_OPERATIONS:
            break
    assert min(done[name] for name in RARE) > NUM_OPERATIONS // 10_000, done


def test_the_random_schedules_do_preempt_share_cancel_repeat_and_load() -> None:
    """The property above is only worth something if the schedules exercise these features."""
    preemptions = hits = cancelled = repeated = accepted = dropped = loaded = failed = lost = jumped = retained = (
        unkept
    ) = begun = evicted = read = 0
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
        lost += world.scheduler.pool.cached.num_lost
        retained += sum(request.diagnostics.retained_tokens for request in world.requests.values())
        unkept += world.scheduler.pool.cached.num_evicted_retained
        if world.scheduler.prefix.checkpoints is not None:
            begun += world.scheduler.prefix.checkpoints.num_hits
            evicted += world.scheduler.prefix.checkpoints.slots.num_evicted
        if world.scheduler.tiers.host is not None:
            loaded += world.scheduler.tiers.host.tokens_loaded
            failed += world.scheduler.tiers.host.copies_failed
        if world.scheduler.tiers.disk is not None:
            read += world.scheduler.tiers.disk.tokens_read
    assert begun > 20
    assert evicted > 20
    assert retained > 100
    assert unkept > 5
    assert loaded > 100
    assert read > 10
    assert failed > 10
    assert lost > 10
    assert accepted > 100
    assert jumped > 100
    assert dropped > 100
    assert preemptions > 20
    assert hits > 100
    assert cancelled > 20
    assert repeated > 100


@settings(max_examples=examples(20), deadline=None)
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
