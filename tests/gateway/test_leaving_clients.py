"""A client that leaves in the turn in which its answer comes leaves nothing open at the replica."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.gateway.fleet import Fleet
from millrace.gateway.replica_http.connection import Answer
from millrace.gateway.routing.candidates import Asked
from millrace.gateway.routing.decisions import RequestRecord
from millrace.gateway.routing.request_facts import RequestFacts
from millrace.gateway.settings import GatewaySettings, ReplicaSettings
from millrace.gateway.upstream import Payload, Sender

TURNS = range(1, 12)
"""From the answer's arrival to its reader a few turns of the loop pass; the client leaves in each of them."""


class FakeAnswer:
    def __init__(self) -> None:
        self.status, self.headers, self.is_closed = 200, {}, False

    def close(self) -> None:
        self.is_closed = True


class FakeClient:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.coming: list[asyncio.Future[Answer]] = []

    async def request(self, *_: object) -> Answer:
        coming = asyncio.get_running_loop().create_future()
        self.coming.append(coming)
        try:
            return await coming
        except asyncio.CancelledError:
            if coming.done() and not coming.cancelled():
                coming.result().close()  # As the connection does.
            raise


def sender_of(**settings: Any) -> tuple[Sender, FakeClient]:
    fleet, client = Fleet(GatewaySettings(**settings)), FakeClient()
    for name in ("a", "b"):
        replica = fleet.add(ReplicaSettings(f"http://{name}:1"))
        replica.health.succeeded(fleet.clock())
    facts = RequestFacts(Asked("id", "", 1, 1), False, 1, False, 0, "", {})
    request = SimpleNamespace(headers={}, method="POST", raw_path="/v1/completions", path="/v1/completions", get={}.get)
    return Sender(fleet, cast(Any, client), cast(Any, request), "id", facts, RequestRecord()), client


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("hedge_ms", [0.0, 0.001, 60_000.0])
def test_an_answer_that_comes_as_its_client_leaves_is_closed(turns: int, hedge_ms: float) -> None:
    async def check() -> None:
        sender, client = sender_of(hedge_ms=hedge_ms)
        opening = asyncio.ensure_future(sender.open(lambda replica: Payload(b"{}"), "new"))
        async with asyncio.timeout(60):
            while len(client.coming) < (2 if hedge_ms == 0.001 else 1):
                await asyncio.sleep(0)
        answers = [FakeAnswer() for _ in client.coming]
        for coming, answer in zip(client.coming, answers, strict=True):
            coming.set_result(cast(Any, answer))
        for _ in range(turns - 1):
            await asyncio.sleep(0)
        opening.cancel()
        (result,) = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(result, BaseException):
            cast(Any, result).close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(
            answer.is_closed for answer, coming in zip(answers, client.coming, strict=True) if not coming.cancelled()
        )
        assert all(not one.attempts for one in sender.fleet.replicas.values()), "its place is free again"

    asyncio.run(check())


def test_an_answer_of_a_replica_that_was_just_given_up_is_closed() -> None:
    async def check() -> None:
        sender, client = sender_of(max_attempts=1)
        opening = asyncio.ensure_future(sender.open(lambda replica: Payload(b"{}"), "new"))
        async with asyncio.timeout(60):
            while not client.coming:
                await asyncio.sleep(0)
        answer = FakeAnswer()
        client.coming[0].set_result(cast(Any, answer))
        await asyncio.sleep(0)
        for one in sender.fleet.replicas.values():
            one.give_up_all("its streams stand still")
        (result,) = await asyncio.gather(opening, return_exceptions=True)
        assert "its streams stand still" in str(result)
        assert answer.is_closed

    asyncio.run(check())
