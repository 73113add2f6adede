"""Handles keep prefixes cached: for their time, within their owner's quota, evicted last, and never in the way of a
request that runs."""

from __future__ import annotations

import numpy as np
from helpers.toy_device import ToyDevice

from millrace.params.keeping import Retain
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.kv.retention import RetentionSettings
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings

VOCAB, BLOCK, NUM_BLOCKS = 97, 4, 24


class Bench:
    def __init__(self, max_blocks: int = 12, host_slots: int = 0, block_bytes: int = 10, **limits: int) -> None:
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK,
                max_running=4,
                token_budget=64,
                expected_output=4.0,
                retention=RetentionSettings(max_blocks, block_bytes),
                host_tier=HostTierSettings(host_slots, block_bytes=1),
                **limits,
            )
        )
        self.device = ToyDevice(NUM_BLOCKS, BLOCK, 4, VOCAB)
        self.now, self.next_id = 0.0, 0

    def submit(self, prompt: list[int], retain: Retain | None = None, owner: str = "", max_tokens: int = 2) -> Request:
        request = Request(
            id=self.next_id,
            prompt=np.asarray(prompt, np.int32),
            max_tokens=max_tokens,
            tenant=owner,
            arrival=self.now,
            retain=retain,
        )
        self.next_id += 1
        self.scheduler.submit(request)
        return request

    def run(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_work:
                return
            self.now += 0.001
            plan = self.scheduler.plan(self.now)
            for copies in self.scheduler.take_copies():
                self.device.begin_copies(copies)
                self.device.end_copies(copies, False)
                self.scheduler.copies_done(copies, False, 0.001)
            if plan is not None:
                self.scheduler.apply(plan.step_no, *self.device.run(plan))
            self.scheduler.take_ended()
            self.scheduler.pool.check()
            self.scheduler.retention.check()
        raise AssertionError("the requests never ended")

    def ask(self, prompt: list[int], retain: Retain | None = None, owner: str = "") -> Request:
        request = self.submit(prompt, retain, owner)
        self.run()
        return request

    def names(self, owner: str | None = "") -> list[str]:
        return [one.name for one in self.scheduler.handles(owner, self.now).handles]


def prompt_of(number: int, length: int = 16) -> list[int]:
    return [(number * 31 + place * (number + 3)) % VOCAB for place in range(length)]


def flood(bench: Bench, first: int = 50, count: int = 10) -> None:
    """Prompts that fill the pool several times."""
    for number in range(first, first + count):
        bench.ask(prompt_of(number, 20))


def test_a_retained_prefix_survives_what_evicts_others() -> None:
    bench = Bench()
    kept = bench.ask(prompt_of(1), Retain(100.0, "mine"))
    bench.ask(prompt_of(2))
    flood(bench)
    assert (kept.diagnostics.handle, kept.diagnostics.retained_tokens) == ("mine", 16)
    assert bench.ask([*prompt_of(1), 5]).cached_tokens == 16
    assert bench.ask([*prompt_of(2), 5]).cached_tokens == 0
    [handle] = bench.scheduler.handles("", bench.now).handles
    assert (handle.tokens, handle.resident_tokens, handle.bytes) == (16, 16, 40)


def test_a_handle_ends_with_its_time_or_when_it_is_dropped() -> None:
    bench = Bench()
    bench.ask(prompt_of(1), Retain(1.0, "short"))
    bench.ask(prompt_of(2), Retain(100.0, "long"))
    assert bench.names() == ["short", "long"]
    bench.now += 2.0
    assert bench.names() == ["long"]
    assert bench.scheduler.pool.cached.num_retained == 4
    assert bench.scheduler.drop_handles("long", "") == 1
    assert bench.scheduler.drop_handles("long", "") == 0
    assert bench.scheduler.pool.cached.num_retained == 0
    flood(bench)
    assert bench.ask([*prompt_of(2), 5]).cached_tokens == 0


def test_part_of_a_prompt_is_retained_as_whole_blocks() -> None:
    bench = Bench()
    noted = bench.ask(prompt_of(1), Retain(100.0, num_tokens=11)).diagnostics
    assert noted.retained_tokens == 8
    assert noted.handle.startswith("prefix-")
    assert "less than one block" in bench.ask(prompt_of(2), Retain(100.0, num_tokens=3)).diagnostics.refused


def test_a_handle_of_the_same_name_is_replaced_and_a_shared_prefix_counts_once() -> None:
    bench = Bench(max_blocks=8)
    bench.ask(prompt_of(1), Retain(100.0, "talk"))
    bench.ask([*prompt_of(1), *prompt_of(2)], Retain(100.0, "talk"))
    bench.ask(prompt_of(1), Retain(100.0, "start"))
    assert sorted(bench.names()) == ["start", "talk"]
    assert bench.scheduler.handles("", bench.now).used_bytes == 80
    bench.scheduler.drop_handles("talk", "")
    assert bench.scheduler.handles("", bench.now).used_bytes == 40


def test_full_is_refused_and_hints_take_the_place_of_older_hints() -> None:
    bench = Bench(max_blocks=8)
    fixed = Retain(100.0, "fixed", is_hint=False)
    bench.ask(prompt_of(1), fixed)
    bench.ask(prompt_of(2), Retain(50.0, "older"))
    bench.ask(prompt_of(3), Retain(60.0, "newer"))
    assert sorted(bench.names()) == ["fixed", "newer"]
    refused = bench.ask(prompt_of(4, 24), Retain(100.0, "more", is_hint=False))
    assert "24 tokens do not fit" in refused.diagnostics.refused
    assert sorted(bench.names()) == ["fixed", "newer"], "a refusal changes nothing"
    assert "48 tokens do not fit: at most 32" in bench.ask(prompt_of(5, 48), Retain(100.0)).diagnostics.refused
    assert sorted(bench.names()) == ["fixed", "newer"], "a hint that can never fit drops no other"
    assert not bench.ask(prompt_of(4), Retain(100.0, "asked", is_hint=False)).diagnostics.refused
    assert sorted(bench.names()) == ["asked", "fixed"], "what was asked for goes before hints"


def test_owners_have_quotas_and_do_not_see_each_other() -> None:
    bench = Bench()
    small = Retain(100.0, "docs", max_bytes=40, is_hint=False)
    assert not bench.ask(prompt_of(1), small, "acme").diagnostics.refused
    other = Retain(100.0, "more", max_bytes=40, is_hint=False)
    assert bench.ask(prompt_of(2), other, "acme").diagnostics.refused
    assert not bench.ask(prompt_of(3), small, "other").diagnostics.refused
    assert bench.names("acme") == bench.names("other") == ["docs"]
    assert bench.names(None) == ["docs", "docs"]
    assert bench.scheduler.drop_handles("docs", "acme") == 1
    assert bench.names("other") == ["docs"]


def test_a_request_that_needs_the_memory_gets_it() -> None:
    """Retained blocks are evicted rather than a request preempted, and come back under their handle."""
    bench = Bench()
    bench.ask(prompt_of(1, 40), Retain(100.0, "big"))
    large = bench.submit(prompt_of(2, 60), max_tokens=30)
    bench.run()
    assert large.preemptions == 0
    assert bench.scheduler.pool.cached.num_evicted_retained > 0
    [handle] = bench.scheduler.handles("", bench.now).handles
    assert handle.resident_tokens < handle.tokens == 40
    bench.ask([*prompt_of(1, 40), 3])
    assert bench.scheduler.handles("", bench.now).handles[0].resident_tokens == 40
    flood(bench)
    assert bench.scheduler.handles("", bench.now).handles[0].resident_tokens == 40


def test_admission_leaves_retained_blocks_alone_while_others_run() -> None:
    bench = Bench()
    bench.ask(prompt_of(1, 48), Retain(100.0, "big"))
    for number in range(10, 16):
        bench.submit(prompt_of(number, 16), max_tokens=8)
    bench.run()
    assert bench.scheduler.pool.cached.num_evicted_retained == 0
    assert bench.scheduler.num_preemptions == 0


def test_with_host_memory_the_other_blocks_leave_first() -> None:
    bench = Bench(host_slots=50)
    bench.ask(prompt_of(1), Retain(100.0, "mine"))
    flood(bench)
    assert bench.scheduler.pool.cached.num_evicted_retained == 0
    assert bench.scheduler.handles("", bench.now).handles[0].resident_tokens == 16
    bench.submit(prompt_of(2, 80), max_tokens=10)
    bench.run()
    bench.scheduler.drop_handles("mine", "")
    flood(bench)


def test_nothing_is_retained_without_room_or_cache() -> None:
    bench = Bench(max_blocks=0)
    assert "do not fit" in bench.ask(prompt_of(1), Retain(100.0)).diagnostics.refused
    off = Bench(prefix_cache=False)
    assert off.ask(prompt_of(1), Retain(100.0)).diagnostics.retained_tokens == 0
    assert off.names() == []
