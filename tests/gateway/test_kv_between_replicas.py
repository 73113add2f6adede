"""A prompt that another replica has computed: its KV blocks are fetched, and a fetch never changes a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from helpers.gateways import gateway_over
from helpers.served import Served, serving
from helpers.tiny_server import NAME, tiny_options

from millrace.gateway.fleet import Fleet
from millrace.gateway.routing.decisions import RequestRecord
from millrace.gateway.routing.request_facts import facts_of
from millrace.gateway.settings import GatewaySettings, ReplicaSettings
from millrace.serve.fetching.shared_part import write_shared
from millrace.serve.fetching.wire import FETCH_HEADER, FROM_HEADER, BlocksWanted, opened, sealed
from millrace.serve.tenancy.block_ticket import BLOCKS_PATH, TICKET_HEADER, covers, is_valid, ticket_for

pytestmark = pytest.mark.live

KEY = "the key of the fleet"
TRUSTED = {"X-Millrace-Gateway-Key": KEY}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    options = ("--dtype", "float32", "--gateway-key", KEY)
    with serving(*tiny_options(folders[0]), *options) as one, serving(*tiny_options(folders[1]), *options) as other:
        yield one, other


def url_of(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"


def prompt_of(name: str) -> list[int]:
    return [ord(letter) for letter in name] + [300 + 7 * number % 3000 for number in range(700)]


async def answered(
    session: aiohttp.ClientSession, url: str, prompt: list[int], headers: dict[str, str]
) -> tuple[list[int], int, str]:
    """Token ids, cached tokens, and what is said of the fetch."""
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, headers=headers) as got:
        answer = await got.json()
        assert got.status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], cached, got.headers.get(FETCH_HEADER, "")


def test_second_replica_computes_only_what_is_new(pair: tuple[Served, Served]) -> None:
    members = [ReplicaSettings(url_of(one), name=name) for one, name in zip(pair, ("a", "b"), strict=True)]
    prompt = prompt_of("together")

    async def check() -> None:
        async with gateway_over(*members, policy="round-robin", gateway_key=KEY) as gateway:
            first = await answered(gateway.session, gateway.url, prompt, {"X-Request-Id": "one"})
            second = await answered(gateway.session, gateway.url, prompt, {"X-Request-Id": "two"})
            assert first[1:] == (0, ""), "the header is between replicas and gateway"
            assert (second[0], second[2]) == (first[0], "")
            assert second[1] == (len(prompt) - 1) // 16 * 16
            _, told = await gateway.get("/v1/requests/two/explain")
            [decision] = told["gateway"]["decisions"]
            assert {decision["kv_from"], decision["replica"]} == {"a", "b"}
            assert f"fetched: {second[1]} tokens" in told["gateway"]["notes"][0]
            replica = decision["replica"]
            page = pair["ab".index(replica)].request("GET", "/metrics")[1]
            assert f"millrace_kv_fetched_tokens_total {float(second[1])}" in page
            third = await answered(gateway.session, gateway.url, prompt_of("other"), {"X-Request-Id": "three"})
            assert third[1] == 0, "nobody had this one"

    asyncio.run(check())


@asynccontextmanager
async def between(source: str, fault: str) -> AsyncIterator[str]:
    """A source that answers wrongly, in the parts and not in the question before them."""

    async def give(request: web.Request) -> web.Response:
        asked, headers = await request.read(), {TICKET_HEADER: request.headers[TICKET_HEADER]}
        assert not {"Authorization", "X-Millrace-Gateway-Key"} & set(request.headers)
        async with (
            aiohttp.ClientSession(skip_auto_headers=("Content-Type",)) as session,
            session.post(source + request.raw_path, data=asked, headers=headers) as answer,
        ):
            data = await answer.read()
        wanted = msgspec.msgpack.decode(asked, type=BlocksWanted)
        if wanted.count and fault == "corrupt":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        elif wanted.count and fault == "scribbled":
            assert write_shared(wanted.shared, b"not what the source wrote")
        elif wanted.count and fault == "slow":
            await asyncio.sleep(3600)
        elif wanted.count and fault == "lost":
            assert request.transport is not None
            request.transport.abort()
        elif fault == "another key":
            given = opened(asked, data, KEY)
            assert given is not None
            data = sealed(asked, given, "not the fleet's")
        return web.Response(body=data)

    app = web.Application()
    app.router.add_post(BLOCKS_PATH, give)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", "fetched: 688 tokens"),
        ("corrupt", "corrupt: nothing"),
        ("scribbled", "corrupt: nothing"),
        ("another key", "corrupt: nothing"),
        ("slow", "failed: nothing"),
        ("lost", "failed: nothing"),
    ],
)
def test_a_fetch_that_fails_is_computed(pair: tuple[Served, Served], fault: str, said: str) -> None:
    first, second = map(url_of, pair)
    prompt = prompt_of(fault)

    async def check() -> None:
        async with aiohttp.ClientSession() as session, between(first, fault) as source:
            expected = await answered(session, first, prompt, {})
            untrusted = await answered(session, second, prompt_of("not " + fault), {FROM_HEADER: source})
            assert untrusted[2] == "", "only a gateway may name a source"
            found = await answered(session, second, prompt, {**TRUSTED, FROM_HEADER: source})
            assert found[0] == expected[0]
            assert found[2].startswith(said), found[2]
            assert (found[1] >= 688) == ("through shared memory" in found[2]) == (fault == "none")

    asyncio.run(check())


def test_a_ticket_is_for_one_question_and_a_short_time() -> None:
    now = 1_800_000_000.5
    ticket = ticket_for(b"asked", NAME, KEY, now)
    assert is_valid(ticket, NAME, KEY, now + 59)
    assert is_valid(ticket, NAME, KEY, now - 59)
    assert covers(ticket, b"asked")
    assert not covers(ticket, b"asked for more")
    assert not is_valid(ticket, NAME, KEY, now + 61)
    assert not is_valid(ticket, NAME, KEY, now - 61)
    assert not is_valid(ticket, "another", KEY, now)
    assert not is_valid(ticket, NAME, "another key", now)
    assert not is_valid(ticket, NAME, "", now)
    for broken in ("", ".", "..", "now" + ticket, ticket[:-1], ticket + "0", "9" * 400 + ticket, "é" + ticket):
        assert not is_valid(broken, NAME, KEY, now)


def test_a_password_in_a_replicas_url_stays_at_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(GatewaySettings(policy="round-robin"), clock=lambda: 100.0)
    for name in "ab":
        fleet.add(ReplicaSettings(f"http://user:secret@{name}:8000", name=name)).health.succeeded(100.0)
    monkeypatch.setattr(Fleet, "kv_source", lambda self, asked, chosen, *_: "b" if chosen == "a" else "a")
    asked = facts_of("/v1/completions", b'{"prompt": "x"}', {}, "r", "", 1000).asked
    replica, attempt = fleet.choose(asked, RequestRecord(), excluded=(), cause="new")
    assert attempt.kv_from == f"http://{'b' if replica.name == 'a' else 'a'}:8000"


def test_blocks_are_given_to_the_fleet_only(pair: tuple[Served, Served]) -> None:
    async def check() -> None:
        async with aiohttp.ClientSession(skip_auto_headers=("Content-Type",)) as session:
            ticket = {TICKET_HEADER: ticket_for(b"?", NAME, KEY, time.time())}
            other = {TICKET_HEADER: ticket_for(b"!", NAME, KEY, time.time())}
            old = {TICKET_HEADER: ticket_for(b"?", NAME, KEY, time.time() - 100)}
            for headers, status in (({}, 403), (TRUSTED, 400), (ticket, 400), (other, 403), (old, 403)):
                async with session.post(
                    f"{url_of(pair[0])}{BLOCKS_PATH}?model={NAME}", data=b"?", headers=headers
                ) as answer:
                    assert answer.status == status

    asyncio.run(check())
