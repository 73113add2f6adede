"""The front's client: readiness is progress, and one receiver's failure is nobody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from millrace.link.channel import InProcessLink
from millrace.link.client import EngineClient
from millrace.link.messages import EngineReady, Finish, Hello, NewRequest, StepTokens, TokenLogprobs, pack_tokens
from millrace.params import SamplingParams

READY = EngineReady(
    model_name="m",
    max_context=100,
    vocab_size=50,
    kv_tokens=100,
    block_size=16,
    dtype="float32",
    device="cpu",
    memory_plan={},
    fingerprint="f",
)


class Receiver:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.tokens = fails, []
        self.finishes: list[Finish] = []

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self.fails:
            raise RuntimeError("a defect")
        self.tokens.append(token_id)

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None:
        self.finishes.append(finish)


def with_client(work: Callable[[InProcessLink, EngineClient], Awaitable[None]]) -> None:
    async def run() -> None:
        link = InProcessLink()
        client = EngineClient(link.front)
        link.send(0, READY)
        await client.wait_ready(5)
        await work(link, client)

    asyncio.run(run())


def test_an_engine_that_was_idle_for_long_is_ready_when_work_comes() -> None:
    async def work(link: InProcessLink, client: EngineClient) -> None:
        client._last_progress = time.monotonic() - 3600
        assert client.is_progressing(time.monotonic())
        client.submit([1, 2], SamplingParams(max_tokens=4), Receiver())
        assert client.is_progressing(time.monotonic())
        assert not client.is_progressing(time.monotonic() + 60)

    with_client(work)


def test_a_receiver_that_fails_ends_alone() -> None:
    async def work(link: InProcessLink, client: EngineClient) -> None:
        bad, good = Receiver(fails=True), Receiver()
        ids = [client.submit([1], SamplingParams(max_tokens=4), sink) for sink in (bad, good)]
        packed = b"".join(request_id.to_bytes(8, "little") for request_id in ids)
        link.send(0, StepTokens(step_no=0, ids=packed, tokens=pack_tokens([7, 8])))
        await asyncio.sleep(0.05)
        assert good.tokens == [8]
        assert [finish.reason for finish in bad.finishes] == ["error"]
        assert good.finishes == []
        sent = link.receive(0)
        assert [type(message) for message in sent[:3]] == [Hello, NewRequest, NewRequest]
        assert sent[3].ids == (ids[0],)
        client.fail("gone")
        assert [finish.message for finish in good.finishes] == ["gone"]

    with_client(work)


def test_nothing_reaches_a_front_that_has_closed() -> None:
    async def work(link: InProcessLink, client: EngineClient) -> None:
        await client.close()
        link.send(0, StepTokens(step_no=0, ids=b"", tokens=b""))
        assert client.stats is None

    with_client(work)
