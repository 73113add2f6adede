"""A client without an engine: it asks for one when it is needed, and no request is lost while an engine retires."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from helpers.waiting import LIMIT_S, until
from link.test_engine_client import READY, Receiver

from millrace.errors import EngineUnavailable
from millrace.link.channel import InProcessLink
from millrace.link.client import EngineClient
from millrace.link.messages import EngineFailed, EngineReady, EngineRetired, Finish, NewRequest, StepTokens
from millrace.params.sampling import SamplingParams


def run(work: Callable[[EngineClient, InProcessLink], Awaitable[None]]) -> None:
    async def main() -> None:
        link = InProcessLink()
        client = EngineClient(link.front)
        link.send(0, READY)
        await client.wait_ready(LIMIT_S)
        await work(client, link)
        await client.close()

    asyncio.run(main())


def requests_of(link: InProcessLink) -> list[int]:
    return [message.id for message in link.receive(0.0) if isinstance(message, NewRequest)]


def test_requests_that_a_retired_engine_did_not_take_go_to_the_next_one() -> None:
    async def work(client: EngineClient, link: InProcessLink) -> None:
        wanted: list[bool] = []
        client.on_wanted = lambda: wanted.append(True)
        sink = Receiver()
        request_id = client.submit([1, 2], SamplingParams(max_tokens=4), sink)
        link.send(0, EngineRetired())
        await until(lambda: client.is_unloaded)
        later = client.submit([3], SamplingParams(max_tokens=4), Receiver())  # Limits of the last engine hold.
        assert wanted == [True], "the engine is asked for once"
        assert not sink.finishes
        following = InProcessLink()
        client.reconnect(following.front)
        assert requests_of(following) == [request_id, later]
        following.send(0, READY)
        following.send(0, StepTokens(1, b"", b"", (Finish(request_id, "stop"),)))
        await until(lambda: bool(sink.finishes))
        assert [finish.reason for finish in sink.finishes] == ["stop"]

    run(work)


def test_a_kept_request_can_be_aborted_and_one_too_long_for_the_next_engine_ends_with_an_error() -> None:
    async def work(client: EngineClient, link: InProcessLink) -> None:
        aborted, too_long = Receiver(), Receiver()
        request_id = client.submit([1], SamplingParams(max_tokens=4), aborted)
        client.submit([1] * 60, SamplingParams(max_tokens=30), too_long)
        link.send(0, EngineRetired())
        await until(lambda: client.is_unloaded)
        client.abort(request_id, "cancelled")
        await until(lambda: bool(aborted.finishes))
        assert [finish.reason for finish in aborted.finishes] == ["cancelled"]
        following = InProcessLink()
        client.reconnect(following.front)
        smaller = EngineReady(**{**{name: getattr(READY, name) for name in READY.__struct_fields__}, "kv_tokens": 50})
        following.send(0, smaller)
        await until(lambda: bool(too_long.finishes))
        assert too_long.finishes[0].reason == "error"
        assert "50" in too_long.finishes[0].message

    run(work)


def test_a_model_that_could_not_be_loaded_is_asked_for_again_by_the_next_request() -> None:
    async def work(client: EngineClient, link: InProcessLink) -> None:
        wanted: list[bool] = []
        client.on_wanted = lambda: wanted.append(True)
        link.send(0, EngineRetired())
        await until(lambda: client.is_unloaded)
        client.want()
        client.give_up("it does not fit")
        with pytest.raises(EngineUnavailable, match="does not fit"):
            client.submit([1], SamplingParams(max_tokens=4), Receiver())
        client.want()
        assert len(wanted) == 2
        assert client.failure is None

    run(work)


def test_a_lack_of_memory_is_left_to_the_supervisor_if_there_is_one() -> None:
    async def work(client: EngineClient, link: InProcessLink) -> None:
        heard: list[str] = []
        client.on_lacks_memory = lambda message: not heard.append(message)
        link.send(0, EngineFailed("too big", lacks_memory=True))
        await until(lambda: client.is_unloaded)
        assert heard == ["too big"]
        assert client.failure is None

    run(work)


def test_without_a_supervisor_a_lack_of_memory_is_a_failure() -> None:
    async def work(client: EngineClient, link: InProcessLink) -> None:
        link.send(0, EngineFailed("too big", lacks_memory=True))
        await until(lambda: client.failure == "too big")

    run(work)
