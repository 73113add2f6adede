"""Each front gets the tokens and ends of its own requests; statistics are sent after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_channel import FakeChannel
from helpers.fake_clock import FakeClock
from helpers.fake_runner import FakeDevice, FakeRunner, run_engine, step_result

from millrace.engine.fronts.outbox import Outbox
from millrace.engine.ledger import Ledger
from millrace.engine.loop import STATS_EVERY_S, Engine
from millrace.link.messages import FRONT_SHIFT, NewRequest, pack_tokens, unpack_tokens
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.run.sampling.logprobs import LogprobColumns
from millrace.run.sampling.pooling import PooledPart
from millrace.run.sampling.prompt_scores import PromptLogprobs


def new_request(request_id: int, max_tokens: int, **params: Any) -> NewRequest:
    chosen = SamplingParams(max_tokens=max_tokens, seed=1, **params)
    return NewRequest(id=request_id, prompt=pack_tokens(range(5)), params=chosen, arrival=1.0)


def columns(count: int) -> LogprobColumns:
    return LogprobColumns(
        token_ids=torch.arange(count),
        logprobs=torch.zeros(count),
        ranks=torch.ones(count, dtype=torch.int64),
        top_ids=torch.zeros((count, 1), dtype=torch.int64),
        top_logprobs=torch.zeros((count, 1)),
    )


@pytest.mark.parametrize("num_fronts", [1, 3])
def test_every_front_gets_only_its_own_requests(num_fronts: int) -> None:
    channel, ledger = FakeChannel(num_fronts=num_fronts), Ledger()
    outbox = Outbox(channel, ledger)
    scheduler = Scheduler(SchedulerSettings(num_blocks=64, block_size=4, max_running=8, token_budget=64))
    ids = [(front << FRONT_SHIFT) + 7 for front in range(num_fronts) if front != 1] + [8]
    for request_id in ids:
        scores = {"prompt_logprobs": 0} if request_id == ids[0] else {}
        message = new_request(request_id, max_tokens=2 if request_id == 8 else 1, **scores)
        request = Request(request_id, np.arange(5, dtype=np.int32) + request_id % 1000, 2 if request_id == 8 else 1)
        ledger.open(message, request, 1.0)
        scheduler.submit(request)
    plan = scheduler.plan(1.0)
    assert plan is not None
    outcome = scheduler.confirm(plan.step_no, np.arange(len(ids), dtype=np.int32) + 40)
    scores = (PromptLogprobs(ids[0], 1, 0, columns(4)),)
    result = step_result(plan, np.arange(len(ids)) + 40, prompt_logprobs=scores)
    finished = outbox.send_step(outcome, result, 2.0)
    assert [finish.id for finish in finished] == ids[:-1]
    assert [front for front, _ in channel.sent] == sorted({request_id >> FRONT_SHIFT for request_id in ids})
    received: dict[int, int] = {}
    for front, message in channel.sent:
        mine = np.frombuffer(message.ids, np.int64).tolist()
        assert all(request_id >> FRONT_SHIFT == front for request_id in mine)
        assert [finish.id for finish in message.finished] == [request_id for request_id in mine if request_id != 8]
        assert [(key, len(entries)) for key, entries in message.prompt_logprobs.items()] == (
            [(ids[0], 5)] if front == 0 else []
        )
        received |= dict(zip(mine, unpack_tokens(message.tokens).tolist(), strict=True))
    assert received == {request_id: 40 + index for index, request_id in enumerate(ids)}
    assert all(finish.first_token_s == finish.total_s == 1.0 for finish in finished)


def test_nothing_is_kept_of_requests_that_end_during_a_step() -> None:
    """Their parts come with the step's result, when their end has been sent."""
    ledger = Ledger()
    outbox = Outbox(FakeChannel(), ledger)
    scheduler = Scheduler(SchedulerSettings(num_blocks=64, block_size=4, max_running=8, token_budget=64))
    for request_id, kind in ((1, {"prompt_logprobs": 0}), (2, {"pooling": "mean"}), (3, {"pooling": "mean"})):
        message = new_request(request_id, max_tokens=0 if kind.get("pooling") else 1, **kind)
        request = Request(request_id, np.arange(5, dtype=np.int32), message.params.max_tokens or 0)
        ledger.open(message, request, 1.0)
        scheduler.submit(request)
    plan = scheduler.plan(1.0)
    assert plan is not None
    for request_id in (1, 2):
        scheduler.abort(request_id)
    outbox.send_ended(0, scheduler.take_ended(), 1.5)
    outcome = replace(scheduler.confirm(plan.step_no, np.zeros(int(plan.samples.sum()), np.int32)), ended=())
    result = step_result(plan, np.zeros(0, np.int32), prompt_logprobs=(PromptLogprobs(1, 1, 0, columns(4)),))
    outbox.send_step(outcome, replace(result, pooled=tuple(PooledPart(one, 0, torch.ones(4)) for one in (2, 3))), 2.0)
    assert outbox.num_collected == 1, "that of the request that goes on"


def test_statistics_follow_the_tokens_and_do_not_count_ended_requests() -> None:
    clock = FakeClock(50.0)

    def pass_time() -> None:
        clock.now += 0.6 * STATS_EVERY_S

    channel = FakeChannel([new_request(1, max_tokens=4)])
    scheduler = Scheduler(SchedulerSettings(num_blocks=64, block_size=4, max_running=8, token_budget=64))
    runner = FakeRunner(on_wait=pass_time)
    run_engine(Engine(scheduler, runner, FakeDevice(), channel, facts=runner.facts, clock=clock))
    messages = [message for _, message in channel.sent]
    assert not any(message.ids for message in messages if message.stats is not None)
    idle, *reports = [message.stats for message in messages if message.stats is not None]
    counts = [len(message.ids) // 8 for message in messages]
    assert counts == [0, 1, 1, 0, 1, 1, 0, 0], "a report when idle, and one after every second step"
    assert (idle.running, idle.output_tokens) == (0, 0)
    assert [(stats.running, stats.output_tokens) for stats in reports] == [(1, 2), (0, 4), (0, 4)]
    assert len(channel.tokens[1]) == 4
