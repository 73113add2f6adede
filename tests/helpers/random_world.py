"""Random schedules: a scheduler with any features over a toy device, and all that became of its requests."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
from helpers.moved_prefixes import ExportedPrefix, exported, imported, transfers_of
from helpers.toy_device import ToyDevice, lone_run

from millrace.params.keeping import Retain
from millrace.plan.budget import StepTarget
from millrace.plan.drafts import DraftSettings
from millrace.plan.figures import prefill_tokens
from millrace.plan.kv.block_hash import owner_mark
from millrace.plan.kv.disk_tier import DiskTier, DiskTierSettings
from millrace.plan.kv.eviction import EvictionSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.kv.retention import RetentionSettings
from millrace.plan.pacing.step_time import StepRates
from millrace.plan.planner.block_names import mark_in
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import BlockCopies, StepPlan

VOCAB = 11
SECRETIVE, OWN_SALT = "a", b"\0a\0"
"""A tenant whose blocks may be its own, and the salt of these."""


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
        has_tiers: bool = False,
        **limits: int,
    ) -> None:
        self.rng, self.depth = rng, depth
        # A low expected output length admits too many requests, which leads to preemptions.
        expected_output = rng.choice([1.0, 1.0, 512.0])
        self.settings = SchedulerSettings(
            **limits,
            prefix_cache=rng.random() < 0.8 or has_tiers,
            expected_output=expected_output,
            policy=rng.choice(["fcfs", "shortest", "feedback", "deadline", "prefix"]),
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
        self.scheduler = Scheduler(self.settings)
        self.device = self.new_device()
        self.capacity = (limits["num_blocks"] // len(windows) - 1) * limits["block_size"]
        self.launched: deque = deque()
        self.copies: list[tuple[BlockCopies, float]] = []
        """Copies in flight, with the times at which they end."""
        self.max_copy_steps = rng.choice([1, 1, 3] if has_tiers else [1, 3, 6, 30])
        self.copy_failures = rng.choice([0.0, 0.05] if has_tiers else [0.0, 0.0, 0.2])
        self.shared_share = 0.9 if has_tiers else 0.6
        self.last_plan: StepPlan | None = None
        self.jumps = rng.choice([0.0, 0.0, 0.2, 0.8])
        self.num_repeated = self.num_jumped = 0
        self.requests: dict[int, Request] = {}
        self.asked: dict[int, dict[str, Any]] = {}
        """What each request is made of."""
        self.stored: dict[int, tuple[int, bytes]] = {}
        """By slot of the disk: number of the last write that ended, and the name that it gave."""
        self.torn: set[int] = set()
        """Slots of the disk whose last write did not end."""
        self.num_writes = 0
        self.is_forgotten = False
        """True while nothing of the tenant that was forgotten may be found."""
        self.num_forgotten: Counter[str] = Counter()
        self.files: deque[ExportedPrefix] = deque(maxlen=4)
        self.num_moved: Counter[str] = Counter()
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.now = 0.0
        self.shared_prompt = [rng.randrange(VOCAB) for _ in range(40)]

    def submit(self) -> None:
        rng, request_id = self.rng, len(self.requests)
        shared = self.shared_prompt[: rng.randrange(0, 30)] if rng.random() < self.shared_share else []
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        room = self.capacity - len(prompt)
        if room < 1:
            return
        max_tokens = rng.randrange(1, min(room, 40) + 1)
        tenant = rng.choice(["", "b"] if self.is_forgotten else ["", SECRETIVE, SECRETIVE, "b"])
        salts = [b"", OWN_SALT, OWN_SALT, OWN_SALT] if tenant == SECRETIVE else [b"", b"", b"", b"other"]
        self.asked[request_id] = {
            "id": request_id,
            "prompt": np.asarray(prompt, np.int32),
            "max_tokens": max_tokens,
            "end_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 1, 6]))),
            "min_tokens": rng.randrange(0, max_tokens + 1) if rng.random() < 0.3 else 0,
            "priority": rng.randrange(3),
            "tenant": tenant,
            "weight": rng.choice([0.5, 1.0, 4.0]),
            "arrival": self.now,
            "salt": rng.choice(salts),
            "deadline": self.now + rng.randrange(1, 60) if rng.random() < 0.1 else math.inf,
            "can_draft": rng.random() < 0.8,
            "read_cache": rng.random() < 0.9,
            "retain": self.handle() if rng.random() < 0.2 else None,
        }
        self.outputs[request_id] = []
        self.begin(request_id)

    def begin(self, request_id: int) -> None:
        output = np.asarray(self.outputs[request_id], np.int32).tobytes()
        self.requests[request_id] = Request(**self.asked[request_id], output=output)
        self.scheduler.submit(self.requests[request_id])

    def new_device(self) -> ToyDevice:
        made = self.settings
        sizes = (made.num_blocks, made.block_size, made.max_running)
        has_states = made.state_slots is not None
        return ToyDevice(*sizes, VOCAB, made.groups.windows, self.rng.randrange(1000), has_states)

    def restart(self) -> None:
        """The process ends at once, and another begins with the disk, on which some blocks are damaged meanwhile. Open
        requests go on with the tokens they have."""
        disk, self.scheduler, self.device = self.device.beside["disk"], Scheduler(self.settings), self.new_device()
        self.device.beside["disk"] = disk
        self.launched.clear()
        self.copies.clear()
        self.last_plan = None
        if self.scheduler.tiers.disk is not None:
            self.torn |= {slot for slot in self.stored if self.rng.random() < 0.3}
            found = sorted(self.stored.items(), key=lambda entry: entry[1][0])
            self.scheduler.tiers.disk.restore((slot, name) for slot, (_, name) in found)
        for request_id in [one for one in self.requests if one not in self.ended]:
            self.begin(request_id)

    def handle(self) -> Retain:
        rng = self.rng
        ttl_s, name = float(rng.randrange(1, 40)), rng.choice(["", "a", "b"])
        return Retain(ttl_s, name, rng.choice([0, 5, 12]), rng.choice([0, 3]), rng.random() < 0.5)

    def drop_handle(self) -> None:
        self.scheduler.drop_handles(self.rng.choice(["a", "b"]), self.rng.choice([None, "", "a"]))

    def copy_handle(self) -> None:
        name, owner, copied = (self.rng.choice(names) for names in (["a", "b"], ["", "a", "b"], ["b", "c"]))
        self.scheduler.copy_handle(name, owner, copied, self.now)

    def export(self) -> None:
        """What is cached of a request leaves as a file, behind the steps that were launched."""
        while self.launched:
            self.complete()
        if not self.requests:
            return
        request = self.requests[self.rng.randrange(len(self.requests))]
        if self.is_forgotten and request.tenant == SECRETIVE:
            return
        tokens = request.prompt.tobytes() + np.asarray(self.outputs[request.id], np.int32).tobytes()
        transfers = transfers_of(self.scheduler, self.device)
        file = exported(transfers, tokens, request.salt, request.tenant, self.now)
        if file is not None:
            self.files.append(file)
            self.num_moved["exported"] += 1

    def import_file(self) -> None:
        """A file comes, perhaps after a restart, or for another tenant; its sender may go away in between."""
        if not self.files:
            return
        while self.launched:
            self.complete()
        file = self.rng.choice(self.files)
        owner = SECRETIVE if file.salt == OWN_SALT else self.rng.choice(["", "a", "b"])
        if self.is_forgotten and owner == SECRETIVE:
            return
        retain = Retain(float(self.rng.randrange(1, 40)), self.rng.choice(["a", "b"]), is_hint=False)
        kept = self.rng.choice([retain, None])
        transfers = transfers_of(self.scheduler, self.device)
        if imported(transfers, file, owner, kept, self.now, self.rng.choice([1, 99, 99])):
            self.num_moved["imported"] += 1
        else:
            self.scheduler.drop_handles(retain.name, owner)
            self.num_moved["refused"] += 1
        self.check_pools()

    def forget(self) -> None:
        """A tenant is forgotten, and later sends requests again."""
        if self.is_forgotten:
            self.is_forgotten = False
            return
        for request_id, request in self.requests.items():
            if request.tenant == SECRETIVE and request_id not in self.ended:
                assert self.scheduler.abort(request_id)
        self.collect(self.scheduler.take_ended())
        found = self.scheduler.forget(SECRETIVE)
        self.num_forgotten += Counter(found.blocks)
        assert found.mark == owner_mark(SECRETIVE.encode())
        # The disk's writer erases after the writes that were issued before.
        self.stored = {slot: one for slot, one in self.stored.items() if mark_in(one[1]) != found.mark}
        self.is_forgotten = True
        self.check_forgotten()

    def check_forgotten(self) -> None:
        mark, pool = owner_mark(SECRETIVE.encode()), self.scheduler.pool
        locations = [pool.named.digests(), *(index.digests() for index in self.scheduler.tiers.indexes)]
        locations.append([name[1:25] for _, name in self.stored.values()])
        assert not any(digest.endswith(mark) for digests in locations for digest in digests)
        assert not any(pool.named.hash_of[block] for block in pool._free)
        assert all(one.owner != SECRETIVE for one in self.scheduler.handles(None, self.now).handles)

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
            self.torn |= set(copies.slots.tolist()) if copies.target == "disk" else set()
            self.copies.append((copies, self.now + self.rng.randrange(1, self.max_copy_steps + 1)))
        due = [copies for copies, ends in self.copies if ends <= self.now]
        self.copies = [(copies, ends) for copies, ends in self.copies if ends > self.now]
        self.rng.shuffle(due)
        for copies in due:
            failed = self.rng.random() < self.copy_failures or self.is_unreadable(copies)
            self.device.end_copies(copies, failed)
            if copies.target == "disk" and not failed:
                for slot, name in zip(copies.slots.tolist(), copies.names, strict=True):
                    if self.is_forgotten and mark_in(name) == owner_mark(SECRETIVE.encode()):
                        self.stored.pop(slot, None)  # Written and then erased.
                        continue
                    self.num_writes += 1
                    self.stored[slot] = self.num_writes, name
                    self.torn.discard(slot)
            self.scheduler.copies_done(copies, failed)

    def is_unreadable(self, copies: BlockCopies) -> bool:
        """The checksum of a block on the disk covers its name and content."""
        if copies.source != "disk":
            return False
        found = zip(copies.blocks.tolist(), copies.names, strict=True)
        return any(slot in self.torn or self.stored[slot][1] != name for slot, name in found)

    @property
    def disk(self) -> DiskTier:
        assert self.scheduler.tiers.disk is not None
        return self.scheduler.tiers.disk

    def disk_figures(self) -> Counter[str]:
        found = {"tokens read": self.disk.tokens_read, "unreadable": self.disk.reads_failed}
        return Counter(found | {"torn": len(self.torn & self.stored.keys())})

    def check_pools(self) -> None:
        self.scheduler.pool.check()
        self.scheduler.retention.check()
        if self.scheduler.tiers.host is not None:
            self.scheduler.tiers.host.index.check()
        if self.scheduler.tiers.disk is not None:
            self.scheduler.tiers.disk.check()
        if self.scheduler.prefix.checkpoints is not None:
            self.scheduler.prefix.checkpoints.slots.check()
        if self.is_forgotten:
            self.check_forgotten()

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
        assert self.scheduler.waiting.tokens.by_class() == prefill_tokens(self.scheduler.rows) == (0, 0, 0)
        assert pool.num_in_use == 0
        assert pool.num_fenced == 0
        assert pool.num_held == 0
        assert self.scheduler.rows.num_free == self.scheduler.rows.capacity


def random_world(seed: int, has_tiers: bool = False) -> World:
    """`has_tiers`: there are host memory and a disk for sure."""
    rng = random.Random(seed)
    max_running = rng.randrange(1, 7)
    windows = rng.choice([(None,), (None,), (None, 5), (7,), (9, None, 4, None)])
    return World(
        rng,
        depth=rng.choice([0, 1, 1, 2]),
        windows=windows,
        state_slots=rng.choice([None, 0, 1, 3, 20]) if windows == (None,) else None,
        max_drafts=rng.choice([0, 0, 1, 3]),
        host_slots=rng.choice([3, 8, 20] if has_tiers else [0, 0, 3, 20, 100]),
        disk_slots=(200 if has_tiers else 0, 12, 200)[seed % 3],
        has_tiers=has_tiers,
        num_blocks=rng.choice([12, 16, 24] if has_tiers else [12, 16, 24, 60]),
        block_size=rng.choice([1, 3, 4, 8]),
        max_running=max_running,
        token_budget=rng.choice([1, 2, max_running, max_running + 3, 40]),
        mixed_budget=rng.choice([0, 4]),
    )
