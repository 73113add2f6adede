"""The engine client: readiness requires progress, and a failing sink affects no other request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from helpers.waiting import LIMIT_S, until

from millrace.errors import BadRequest
from millrace.link import client as client_module
from millrace.link.channel import InProcessLink
from millrace.link.client import EngineClient
from millrace.link.front.limits import checked_ids
from millrace.link.messages import (
    EngineReady,
    Finish,
    Hello,
    NewRequest,
    StepTokens,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from millrace.params.sampling import SamplingParams

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
        await client.wait_ready(LIMIT_S)
        await work(link, client)

    asyncio.run(run())


def test_an_engine_that_was_idle_for_long_is_ready_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def work(link: InProcessLink, client: EngineClient) -> None:
        nonlocal now
        now += 3600
        assert client.is_progressing(now)
        client.submit([1, 2], SamplingParams(max_tokens=4), Receiver())
        assert client.is_progressing(now)
        assert not client.is_progressing(now + 60)

    with_client(work)


def test_a_failing_sink_ends_only_its_own_request() -> None:
    async def work(link: InProcessLink, client: EngineClient) -> None:
        bad, good = Receiver(fails=True), Receiver()
        ids = [client.submit([1], SamplingParams(max_tokens=4), sink) for sink in (bad, good)]
        packed = b"".join(request_id.to_bytes(8, "little") for request_id in ids)
        link.send(0, StepTokens(step_no=0, ids=packed, tokens=pack_tokens([7, 8])))
        await until(lambda: good.tokens and bad.finishes)
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
    async def work() -> None:
        link, received = InProcessLink(), []
        link.front.start(asyncio.get_running_loop(), received.append)
        link.send(0, READY)
        await until(lambda: received)
        link.front.close()
        link.send(0, READY)
        await asyncio.sleep(0)  # The loop's next turn, in which it would arrive.
        assert received == [READY]

    asyncio.run(work())


def test_a_seed_is_filled_in_and_nothing_else_changes() -> None:
    asked = SamplingParams(max_tokens=5, temperature=0.5, stop=("x",), logit_bias=((3, 1.5),), logprobs=2)
    assert asked.with_seed(77) == msgspec.structs.replace(asked, seed=77)


@pytest.mark.parametrize("prompt", [[1, 50], [-1, 3], [2**40], [3, -(2**70)], [2**64]])
def test_an_invalid_token_id_is_named_in_the_error(prompt: list[int]) -> None:
    bad = next(token_id for token_id in prompt if not 0 <= token_id < 50)
    with pytest.raises(BadRequest, match=f"token id {bad}; the vocabulary has ids 0 to 49"):
        checked_ids(prompt, 50)


def test_a_prompt_may_be_any_sequence_of_ids() -> None:
    for prompt in ([0, 49, 7], (0, 49, 7), np.array([0, 49, 7], np.int32)):
        assert unpack_tokens(pack_tokens(checked_ids(prompt, 50))).tolist() == [0, 49, 7]
    with pytest.raises(BadRequest, match="no tokens"):
        checked_ids([], 50)
