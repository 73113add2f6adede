"""The client that measures overload: a stream that waits is not served yet, and may still fail."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve.front_under_test import endless, running_front
from serve.wire import eventually

from millrace.faults.overload import ClassResult, send_one
from millrace.faults.wire import Address
from millrace.serve.generate import heartbeat

pytestmark = pytest.mark.live


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_counts_from_its_first_event(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.02)
    result = ClassResult("standard")
    with running_front(endless) as front, ThreadPoolExecutor(1) as pool:
        front.call(front.engine.pause)
        address = Address.of(front.url)
        sent = pool.submit(lambda: asyncio.run(send_one(address, 1, result)))
        eventually(
            lambda: any(job.out is not None and job.out.started for job in front.call(lambda: [*front.state.jobs]))
        )
        assert (result.ttft_s, result.served, result.failed) == ([], 0, 0)
        if fails:
            front.engine.poison.add(front.engine.received[-1].id)
        front.call(front.engine.resume)
        sent.result(60)
    assert (len(result.ttft_s), result.served, result.failed) == ((0, 0, 1) if fails else (1, 1, 0))
