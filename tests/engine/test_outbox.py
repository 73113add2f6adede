"""Each front gets the tokens and ends of its own requests; statistics are sent after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engine.ledger import Ledger
from millrace.engine.loop import STATS_EVERY_S, Engine
from millrace.engine.outbox import Outbox
from millrace.link.messages import FRONT_SHIFT, NewRequest, StepTokens, ToEngine, ToFront, pack_tokens, unpack_tokens
from millrace.params import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler
from millrace.plan.step import StepPlan
from millrace.run.runner import StepResult
from millrace.run.sampling.logprobs import LogprobColumns
from millrace.run.sampling.masks import Masks
from millrace.run.sampling.prompt_scores import PromptLogprobs

NONE = np.zeros(0, np.int64)


class Channel:
    def __init__(self, num_fronts: int = 1) -> None:
        self.num_fronts = num_fronts
        self.sent: list[tuple[int, StepTokens]] = []

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> list[ToEngine]:
        return []

    def send(self, front_index: int, message: ToFront) -> None:
        assert isinstance(message, StepTokens)
        self.sent.append((front_index, message))

    def send_all(self, message: ToFront) -> None:
        for front in range(self.num_fronts):
            self.send(front, message)

    def close(self) -> None: ...


def new_request(request_id: int, max_tokens: int, **params: Any) -> NewRequest:
    chosen = SamplingParams(max_tokens=max_tokens, seed=1, **params)
    return NewRequest(id=request_id, prompt=pack_tokens(range(5)), params=chosen, arrival=1.0)


def result_of(plan: StepPlan, tokens: list[int], scores: tuple[PromptLogprobs, ...] = ()) -> StepResult:
    return StepResult(plan.step_no, torch.tensor(tokens), None, NONE, NONE.astype(np.int32), scores)


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
    channel, ledger = Channel(num_fronts), Ledger()
    outbox = Outbox(channel, ledger)
    scheduler = Scheduler(num_blocks=64, block_size=4, max_running=8, token_budget=64)
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
    finished = outbox.send_step(outcome, result_of(plan, list(range(40, 40 + len(ids))), scores), 2.0)
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


def test_statistics_follow_the_tokens_and_do_not_count_ended_requests() -> None:
    channel, now = Channel(), 50.0
    scheduler = Scheduler(num_blocks=64, block_size=4, max_running=8, token_budget=64)

    class Runner:
        is_built = True

        def forward(self, plan: StepPlan) -> None: ...

        def draw(self, plan: StepPlan, masks: Masks | None) -> Any:
            return SimpleNamespace(wait=lambda: result_of(plan, [9]))

    device: Any = SimpleNamespace(kind="cpu", poll_s=0.0, probe=None)
    runner: Any = Runner()
    engine = Engine(scheduler, runner, device, channel, clock=lambda: now)
    for number in range(2):
        engine._handle(new_request(number, max_tokens=1))
        while engine._cycle.advance():
            pass
        now += STATS_EVERY_S / 2
    (_, tokens), (_, statistics), (_, later) = channel.sent
    assert tokens.stats is None
    assert unpack_tokens(tokens.tokens).tolist() == unpack_tokens(later.tokens).tolist() == [9]
    assert statistics.stats is not None
    assert (statistics.stats.running, statistics.stats.output_tokens, statistics.stats.step_no) == (0, 1, 0)
    assert not statistics.ids
    assert later.stats is None, "statistics are not repeated so soon"
