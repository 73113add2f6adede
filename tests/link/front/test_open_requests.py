"""Requests whose engine dies wait for the next one and are sent to it with their tokens, within bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from helpers.waiting import LIMIT_S, until
from link.test_engine_client import READY, Receiver

from millrace.errors import EngineUnavailable
from millrace.link.channel import InProcessLink
from millrace.link.client import EngineClient
from millrace.link.messages import (
    Abort,
    EngineFailed,
    EngineLoading,
    EngineRetired,
    Finish,
    NewRequest,
    StepTokens,
    pack_tokens,
    unpack_tokens,
)
from millrace.params.sampling import SamplingParams

ASKED = SamplingParams(max_tokens=20)


class Server:
    """A client and the engines that it gets one after the other."""

    def __init__(self, resume_s: float) -> None:
        self.link = InProcessLink()
        self.client = EngineClient(self.link.front, resume_s=resume_s)

    async def ready(self) -> None:
        self.link.send(0, READY)
        await self.client.wait_ready(LIMIT_S)

    async def tokens(self, request_id: int, tokens: list[int], *, ended: bool = False) -> None:
        finished = (Finish(request_id, "length", output_tokens=20),) if ended else ()
        ids = request_id.to_bytes(8, "little") * len(tokens)
        self.link.send(0, StepTokens(0, ids, pack_tokens(tokens), finished))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def replace(self) -> dict[int, NewRequest]:
        """A new engine, which is not ready yet. Returns what it is sent."""
        self.link = InProcessLink()
        self.client.reconnect(self.link.front)
        return {message.id: message for message in self.link.receive(0.0) if isinstance(message, NewRequest)}


def run(work: Callable[[Server], Awaitable[None]], resume_s: float = 3600.0) -> None:
    async def main() -> None:
        server = Server(resume_s)
        await server.ready()
        await work(server)
        await server.client.close()

    asyncio.run(main())


def test_the_next_engine_gets_the_request_with_its_tokens() -> None:
    async def work(server: Server) -> None:
        client, begun, waiting = server.client, Receiver(), Receiver()
        before = time.monotonic()
        first = client.submit([1, 2], ASKED, begun, end_token_ids=(9,), deadline=before + 3600)
        second = client.submit([3], ASKED, waiting)
        sent = [message for message in server.link.receive(0.0) if isinstance(message, NewRequest)]
        await server.tokens(first, [5, 6, 7])
        client.fail("it died")
        assert (begun.finishes, client.requests.num_waiting, client.requests.is_waiting) == ([], 2, True)
        messages = server.replace()
        for message in sent:
            resumed = messages[message.id].resumed
            assert resumed is not None
            assert messages[message.id] == NewRequest(
                **{**{name: getattr(message, name) for name in message.__struct_fields__}, "resumed": resumed}
            ), "seed, limits, arrival and names stay as they were"
            assert before <= resumed.lost <= time.monotonic()
            assert resumed.losses == 1
        taken_up, anew = messages[first].resumed, messages[second].resumed
        assert taken_up is not None
        assert anew is not None
        assert unpack_tokens(taken_up.output).tolist() == [5, 6, 7]
        assert before <= taken_up.first_token <= taken_up.lost
        assert (anew.output, anew.first_token) == (b"", 0.0)
        await server.ready()
        assert (client.requests.num_resumed, client.requests.num_waiting, client.requests.is_waiting) == (2, 0, False)
        await server.tokens(first, [8], ended=True)
        assert begun.tokens == [5, 6, 7, 8]
        assert [finish.reason for finish in begun.finishes] == ["length"]
        assert client.requests.num_given_up == 0

    run(work)


def test_an_engine_that_retires_before_it_takes_a_request_over_loses_no_token() -> None:
    async def work(server: Server) -> None:
        client = server.client
        request_id = client.submit([1], ASKED, Receiver())
        await server.tokens(request_id, [5, 6])
        client.fail("it died")
        server.replace()
        await server.ready()
        server.link.send(0, EngineRetired())
        await until(lambda: client.is_unloaded)
        resumed = server.replace()[request_id].resumed
        assert resumed is not None
        assert unpack_tokens(resumed.output).tolist() == [5, 6]

    run(work)


def test_a_request_that_saw_two_engines_die_is_not_tried_again() -> None:
    async def work(server: Server) -> None:
        client, poison, other = server.client, Receiver(), Receiver()
        client.submit([1], ASKED, poison)
        client.fail("it died")
        server.replace()
        await server.ready()
        later = client.submit([2], ASKED, other)
        server.link.send(0, EngineFailed("it died again"))
        await until(lambda: client.failure is not None)
        client.fail("what the supervisor saw of the same death")
        assert [finish.reason for finish in poison.finishes] == ["crash"]
        assert "died 2 times" in poison.finishes[0].message
        assert "it died again" in poison.finishes[0].message
        assert other.finishes == []
        assert list(server.replace()) == [later]
        assert client.requests.num_given_up == 1

    run(work)


def test_an_engine_that_dies_while_it_loads_is_no_fault_of_the_requests() -> None:
    async def work(server: Server) -> None:
        client, sink = server.client, Receiver()
        request_id = client.submit([1], ASKED, sink)
        client.fail("it died")
        for _ in range(4):
            server.replace()
            server.link.send(0, EngineFailed("it could not load"))
            await until(lambda: client.failure == "it could not load")
            client.failure = "being restarted"
        message = server.replace()[request_id]
        assert message.resumed is not None
        assert message.resumed.losses == 1
        assert sink.finishes == []

    run(work)


def test_the_wait_has_a_bound() -> None:
    async def work(server: Server) -> None:
        sink = Receiver()
        server.client.submit([1], ASKED, sink)
        server.client.fail("it died.")
        await until(lambda: bool(sink.finishes))
        assert sink.finishes[0].reason == "error"
        assert sink.finishes[0].message == "it died. No engine was ready within 0.01 s."
        assert (server.client.requests.num_given_up, server.client.requests.num_waiting) == (1, 0)

    run(work, resume_s=0.01)


def test_an_engine_that_says_that_it_loads_is_waited_for_longer() -> None:
    async def work(server: Server) -> None:
        requests = server.client.requests
        lost_at = time.monotonic()
        assert "within 100 s" in requests.late(lost_at + 100, lost_at)
        server.link.send(0, EngineLoading("weights", 1, 2))
        await until(lambda: server.client.loading is not None)
        assert requests.late(lost_at + 100, lost_at) == ""
        assert "no progress for 100 s" in requests.late(time.monotonic() + 100, lost_at)
        requests.progress_at = lost_at + 450
        assert "within 500 s" in requests.late(lost_at + 500, lost_at)

    run(work, resume_s=100.0)


def test_a_deadline_holds_while_a_request_waits() -> None:
    async def work(server: Server) -> None:
        late, patient = Receiver(), Receiver()
        request_id = server.client.submit([1], ASKED, late, deadline=time.monotonic() + 0.01)
        server.client.submit([1], ASKED, patient, deadline=time.monotonic() + 3600)
        await server.tokens(request_id, [4, 4])
        server.client.fail("it died")
        await until(lambda: bool(late.finishes))
        assert (late.finishes[0].reason, late.finishes[0].output_tokens) == ("deadline", 2)
        assert patient.finishes == []

    run(work)


def test_a_waiting_request_can_be_aborted_before_and_after_the_next_engine_has_begun_to_load() -> None:
    async def work(server: Server) -> None:
        early, late = Receiver(), Receiver()
        first, second = (server.client.submit([1], ASKED, sink) for sink in (early, late))
        server.client.fail("it died")
        server.client.abort(first, "cancelled")
        assert early.finishes == [], "a sink is not called while its owner is busy with others"
        assert list(server.replace()) == [second]
        assert [finish.reason for finish in early.finishes] == ["cancelled"]
        server.client.abort(second)
        await until(lambda: bool(late.finishes))
        assert [finish.reason for finish in late.finishes] == ["abort"]
        assert [message.ids for message in server.link.receive(0.0) if isinstance(message, Abort)] == [(second,)]

    run(work)


def test_a_request_that_was_aborted_before_its_engine_died_does_not_come_back() -> None:
    async def work(server: Server) -> None:
        stopped = Receiver()
        server.client.abort(server.client.submit([1], ASKED, stopped), "stop")
        assert stopped.finishes == []
        server.client.fail("it died")
        assert [finish.reason for finish in stopped.finishes] == ["stop"]
        assert server.replace() == {}

    run(work)


def test_a_request_aborted_while_its_engine_retires_does_not_come_back() -> None:
    async def work(server: Server) -> None:
        sink = Receiver()
        request_id = server.client.submit([1], ASKED, sink)
        server.client.abort(request_id, "cancelled")
        server.link.send(0, EngineRetired())
        await until(lambda: server.client.is_unloaded)
        assert server.replace() == {}
        assert [finish.reason for finish in sink.finishes] == ["cancelled"]

    run(work)


@pytest.mark.parametrize("end", ["give up", "close"])
def test_nothing_waits_for_an_engine_that_will_not_come(end: str) -> None:
    async def work(server: Server) -> None:
        sink = Receiver()
        server.client.submit([1], ASKED, sink)
        server.client.fail("it died")
        if end == "give up":
            server.client.give_up("it cannot be loaded")
        else:
            await server.client.close()
        assert [finish.reason for finish in sink.finishes] == ["error"]
        assert ("cannot be loaded" if end == "give up" else "shutting down") in sink.finishes[0].message
        assert not server.client.requests.is_waiting

    run(work)


def test_a_search_goes_on_and_new_requests_are_refused() -> None:
    async def work(server: Server) -> None:
        client = server.client
        search = client.begin_search()
        client.fail("it died")
        with pytest.raises(EngineUnavailable, match="it died"):
            client.submit([1], ASKED, Receiver())
        step = client.submit([1], SamplingParams(max_tokens=1), Receiver(), search=search)
        message = server.replace()[step]
        assert (message.search, message.resumed) == (search, None)

    run(work)


def test_without_a_next_engine_requests_end_at_once() -> None:
    async def work(server: Server) -> None:
        sink = Receiver()
        search = server.client.begin_search()
        server.client.submit([1], ASKED, sink)
        server.client.fail("it died")
        assert [(finish.reason, finish.message) for finish in sink.finishes] == [("error", "it died")]
        with pytest.raises(EngineUnavailable, match="it died"):
            server.client.submit([1], SamplingParams(max_tokens=1), Receiver(), search=search)

    run(work, resume_s=0.0)
