"""A scheduler with tiers over a toy device: blocks that return must have the content that a lone run computes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.toy_device import ToyDevice, lone_run

from millrace.params.keeping import Retain
from millrace.plan.kv.disk_tier import DiskTier, DiskTierSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTier, HostTierSettings
from millrace.plan.kv.retention import RetentionSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import BlockCopies

VOCAB, BLOCK, NUM_BLOCKS, PROMPT = 11, 4, 30, 40


ROUTES = ("device host", "host device", "host disk", "disk host")


def route(copies: BlockCopies) -> str:
    return f"{copies.source} {copies.target}"


class TierBench:
    """A scheduler with a host tier and perhaps a disk, a toy device, and copies that take `copy_steps` steps."""

    def __init__(
        self,
        num_slots: int = 200,
        windows: tuple[int | None, ...] = (None,),
        copy_steps: int = 2,
        batch: int = 8,
        retained: int = 0,
        disk_slots: int = 0,
    ) -> None:
        num_blocks = NUM_BLOCKS * len(windows)
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=num_blocks,
                block_size=BLOCK,
                max_running=2,
                token_budget=16,
                expected_output=4.0,
                groups=KvGroups(windows),
                host_tier=HostTierSettings(num_slots, block_bytes=1, batch_bytes=batch),
                retention=RetentionSettings(retained),
                disk_tier=DiskTierSettings(disk_slots),
            )
        )
        self.device = ToyDevice(num_blocks, BLOCK, 2, VOCAB, windows)
        self.copies: list[tuple[BlockCopies, int]] = []
        self.copy_steps = dict.fromkeys(ROUTES, copy_steps)
        """By source and target."""
        self.block_s = 0.0
        """Seconds to copy a block."""
        self.fails: set[str] = set()
        """Copies that fail, by source and target."""
        self.unreadable: set[int] = set()
        """Slots of the disk."""
        self.stored: dict[int, bytes] = {}
        """What the disk has beside its blocks."""
        self.num_issued = dict.fromkeys(ROUTES, 0)
        self.step_no = self.num_computed = 0
        self.next_id = 0
        self.outputs: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}

    @property
    def tier(self) -> HostTier:
        assert self.scheduler.tiers.host is not None
        return self.scheduler.tiers.host

    @property
    def disk(self) -> DiskTier:
        assert self.scheduler.tiers.disk is not None
        return self.scheduler.tiers.disk

    def submit(self, prompt: list[int], salt: bytes = b"", retain: Retain | None = None) -> int:
        tokens = np.asarray(prompt, np.int32)
        request = Request(id=self.next_id, prompt=tokens, max_tokens=4, salt=salt, retain=retain)
        self.requests[request.id], self.outputs[request.id] = request, []
        self.next_id += 1
        self.scheduler.submit(request)
        return request.id

    def step(self) -> None:
        self.step_no += 1
        plan = self.scheduler.plan(float(self.step_no))
        for copies in self.scheduler.take_copies():
            self.num_issued[route(copies)] += len(copies.blocks)
            self.device.begin_copies(copies)
            self.copies.append((copies, self.step_no + self.copy_steps[route(copies)]))
        if plan is not None:
            self.num_computed += plan.num_tokens
            outcome = self.scheduler.apply(plan.step_no, *self.device.run(plan))
            for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                self.outputs[request_id].append(token)
        due = [copies for copies, ends in self.copies if ends <= self.step_no]
        self.copies = [(copies, ends) for copies, ends in self.copies if ends > self.step_no]
        for copies in due:
            failed = route(copies) in self.fails
            if copies.source == "disk":
                failed = failed or not self.unreadable.isdisjoint(copies.blocks.tolist())
                assert failed or [self.stored[slot] for slot in copies.blocks.tolist()] == list(copies.names)
            elif copies.target == "disk" and not failed:
                self.stored |= dict(zip(copies.slots.tolist(), copies.names, strict=True))
            self.device.end_copies(copies, failed)
            self.scheduler.copies_done(copies, failed, seconds=len(copies.blocks) * self.block_s)
        self.scheduler.pool.check()
        self.tier.index.check()
        if self.scheduler.tiers.disk is not None:
            self.disk.check()

    def run(self, limit: int = 400) -> None:
        """Until all requests have ended; checks their tokens."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        else:
            pytest.fail("requests never ended")
        for request_id, output in self.outputs.items():
            request = self.requests[request_id]
            assert output == lone_run(request.prompt.tolist(), request.max_tokens, (), 0, VOCAB)[0]

    def start_loading(self, prompt: list[int]) -> int:
        """Submit a request whose prefix is in host memory, until its first blocks are arriving."""
        request_id, issued = self.submit(prompt), self.num_issued["host device"]
        while self.num_issued["host device"] == issued:
            self.step()
        return request_id

    def answer(self, prompt: list[int]) -> int:
        """Number of the prompt's tokens that were found when it was answered alone."""
        request_id = self.submit(prompt)
        self.run()
        return self.requests[request_id].cached_tokens


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, PROMPT).tolist() for _ in range(count)]


WORKING_SET = 3 * NUM_BLOCKS // (PROMPT // BLOCK)


def spill(bench: TierBench, prompt: list[int]) -> None:
    """Have the prompt's blocks in host memory only."""
    bench.answer(prompt)
    for other in prompts(WORKING_SET + 1)[1:]:
        bench.answer(other)
