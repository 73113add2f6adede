"""When a prompt's KV blocks are fetched and when they are computed, with an engine and a source that only answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from helpers.fake_clock import FakeClock

from millrace.link.block_parts import PartAnswer, PartOfPrefix, PrefixFacts
from millrace.serve.fetching.fetcher import FORGET_S, Fetched, Prefix, PrefixFetcher
from millrace.serve.fetching.wire import BlocksGiven, BlocksWanted, sealed
from millrace.serve.tenancy.block_ticket import BLOCKS_PATH

pytestmark = pytest.mark.live

FACTS = PrefixFacts("layout", "model", block_tokens=16, part_blocks=8, part_bytes=8 * 1000)
NUM_COLUMNS = 40
TOKENS = b"\1\0\0\0" * (16 * NUM_COLUMNS + 1)
ALL = 16 * NUM_COLUMNS


class FakeEngine:
    """An engine client: what is cached, and the parts that were written."""

    def __init__(self, own: int = 0, tokens_per_s: float = 0.0) -> None:
        self.own = own
        self.written: list[PartOfPrefix] = []
        self.stats = SimpleNamespace(tokens_per_s=tokens_per_s)

    async def query(self, kind: str, name: str, tenant: str | None) -> bytes:
        return msgspec.msgpack.encode(FACTS)

    async def move_part(self, part: PartOfPrefix) -> PartAnswer:
        if part.count:
            self.written.append(part)
            self.own = part.first + part.count
        return PartAnswer(columns=self.own)


async def fetched(
    engine: FakeEngine, fetcher: PrefixFetcher, *, times: int = 1, facts: PrefixFacts = FACTS, rate: float | None = None
) -> list[Fetched]:
    async def give(request: web.Request) -> web.Response:
        asked = await request.read()
        wanted = msgspec.msgpack.decode(asked, type=BlocksWanted)
        given = BlocksGiven(facts.identity, facts.layout, facts.block_tokens, NUM_COLUMNS)
        if wanted.count:
            has = (tuple([True] * wanted.count),)
            given = msgspec.structs.replace(given, has=has, blocks=bytes(1000 * wanted.count))
        return web.Response(body=sealed(asked, msgspec.msgpack.encode(given), "k"))

    app = web.Application()
    app.router.add_post(BLOCKS_PATH, give)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client: Any = engine
    source = f"http://127.0.0.1:{runner.addresses[0][1]}"
    if rate is not None:
        fetcher.measured(source, rate)
    try:
        prefix = Prefix(client, "model", "", b"", TOKENS)
        return await asyncio.gather(*(fetcher.fetch(prefix, source, "k") for _ in range(times)))
    finally:
        await fetcher.close()
        await runner.cleanup()


def test_what_is_missing_is_fetched_in_parts_and_by_one_of_equal_prompts() -> None:
    engine = FakeEngine(own=3)
    found = asyncio.run(fetched(engine, PrefixFetcher(), times=3))
    assert sorted(one.outcome for one in found) == ["fetched", "unneeded", "unneeded"]
    assert sum(one.num_tokens for one in found) == ALL - 3 * 16
    assert [(one.first, one.count) for one in engine.written] == [(3, 8), (11, 8), (19, 8), (27, 8), (35, 5)]


def test_a_source_with_little_more_is_not_asked_for_blocks() -> None:
    engine = FakeEngine(own=NUM_COLUMNS - 15)
    [found] = asyncio.run(fetched(engine, PrefixFetcher()))
    assert (found.outcome, engine.written) == ("unneeded", [])


def test_another_model_gives_nothing() -> None:
    engine = FakeEngine()
    other = msgspec.structs.replace(FACTS, identity="another")
    [found] = asyncio.run(fetched(engine, PrefixFetcher(), facts=other))
    assert (found.outcome, engine.written) == ("failed", [])
    assert "serves another model" in found.why


@pytest.mark.parametrize(
    ("tokens_per_s", "bytes_per_s", "outcome"),
    [(1e3, 10.0, "slower"), (1e3, 1e9, "fetched"), (1e9, 1e6, "slower"), (0.0, 10.0, "fetched"), (1e3, 0.0, "slower")],
)
def test_computing_wins_where_it_is_predicted_to_be_faster(
    tokens_per_s: float, bytes_per_s: float, outcome: str
) -> None:
    engine = FakeEngine(tokens_per_s=tokens_per_s)
    [found] = asyncio.run(fetched(engine, PrefixFetcher(FakeClock()), rate=bytes_per_s))
    assert found.outcome == outcome
    assert bool(engine.written) == (outcome == "fetched")


def test_a_source_that_failed_is_forgotten_after_a_while() -> None:
    clock = FakeClock()
    fetcher = PrefixFetcher(clock)
    assert fetcher.rate("a") is None, "unknown: it is tried"
    fetcher.measured("a", 0.0)
    assert fetcher.rate("a") == 0.0
    clock.now += FORGET_S
    assert fetcher.rate("a") is None
