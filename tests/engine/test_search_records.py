"""What the engine records of a beam search, whose steps come one after the other."""

from __future__ import annotations

import msgspec
import numpy as np

from millrace.engine.ledger import Ledger
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import FRONT_SHIFT, Finish, NewRequest, pack_tokens
from millrace.observe.histograms import SEQUENCE, TTFT
from millrace.observe.slo.objective import parse_objectives
from millrace.observe.slo.tracker import SloTracker
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request, end_of

SEARCH = 5


def step(ledger: Ledger, number: int, now: float, search: int = SEARCH) -> Request:
    """A step arrives."""
    prompt = [1, 2, 3, *range(number)]
    message = NewRequest(
        id=10 + number,
        prompt=pack_tokens(prompt),
        params=SamplingParams(max_tokens=1),
        arrival=now,
        received=1.0,
        names=("asked", "answer"),
        tenant="mine",
        search=search,
    )
    request = Request(id=message.id, prompt=np.array(prompt, np.int32), max_tokens=1)
    ledger.open(message, request, now)
    return request


def run(ledger: Ledger, request: Request, now: float) -> None:
    ledger.on_admitted(request.id, now)
    ledger.on_first_token(request.id, now)
    ledger.close(end_of(request, "length", 1), now)


def test_the_steps_of_a_search_are_one_request() -> None:
    ledger = Ledger()
    for number in range(4):
        run(ledger, step(ledger, number, 2.0 + number), 2.5 + number)
    assert (len(ledger), dict(ledger.finished), ledger.prompt_tokens) == (1, {}, 3)
    [entry] = ledger.named("asked", "mine")
    assert (entry.admitted, entry.first_token, entry.finish) == (2.5, 2.5, None)
    ledger.close_search(Finish(id=SEARCH, reason="stop", prompt_tokens=3, output_tokens=4, total_s=4.0))
    ledger.close_search(Finish(id=SEARCH, reason="stop"))
    assert (len(ledger), dict(ledger.finished)) == (0, {"stop": 1})
    assert ledger.named("answer", "mine") == [entry]
    assert ledger.histograms.values[[TTFT, SEQUENCE], :, :-1].sum(axis=(1, 2)).tolist() == [1, 1]
    figures = msgspec.structs.replace(EngineStats(*[0] * 13), histograms=ledger.histograms.tobytes())
    tracker = SloTracker(parse_objectives("ttft p90 < 1 s; e2e p90 < 1 s"))
    tracker.sample(0.0, figures)
    assert tracker.total == [1, 1], "one request uses the error budgets once"
    [tenant] = ledger.tenants.figures()
    assert msgspec.structs.astuple(tenant) == ("mine", 0, 0, 1, 3, 0, 4, 0, 0, 0)


def test_steps_of_a_cancelled_search_end_at_once() -> None:
    ledger = Ledger()
    run(ledger, step(ledger, 0, 2.0), 2.5)
    [entry] = ledger.named("asked", None)
    assert ledger.cancel(entry) == []  # between two steps
    assert ledger.is_cancelled(step(ledger, 1, 3.0).id)
    assert ledger.cancel(entry) == [11]
    assert not ledger.is_cancelled(step(ledger, 2, 3.0, search=6).id)


def test_searches_of_a_dead_front_end() -> None:
    ledger = Ledger()
    step(ledger, 0, 2.0, search=SEARCH)
    step(ledger, 1, 2.0, search=(1 << FRONT_SHIFT) + 1)
    ledger.abort_searches(1, 9.0)
    assert dict(ledger.finished) == {"abort": 1}
    assert [entry.finish is None for entry in ledger.named("asked", None)] == [True, False]
