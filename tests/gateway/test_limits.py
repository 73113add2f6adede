"""Quotas and budgets that several gateways share, and what is left of them while the store is lost."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helpers.fake_clock import FakeClock
from helpers.waiting import until

from millrace.errors import BadRequest, ConfigError, QuotaExceeded
from millrace.gateway.limits.limits import Limits, store_named
from millrace.gateway.limits.redis_store import RedisStore
from millrace.gateway.limits.sqlite_store import SqliteStore
from millrace.gateway.limits.store import LEASE_S, Demand, LimitStore, StoreLost, verdict
from millrace.serve.tenancy.keyring import Tenant

NEEDS_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")


@asynccontextmanager
async def two_stores(kind: str, folder: Path) -> AsyncIterator[tuple[LimitStore, LimitStore]]:
    """Of two gateways."""
    if kind == "sqlite":
        stores: tuple[LimitStore, LimitStore] = (
            SqliteStore(folder / "limits.db", "a"),
            SqliteStore(folder / "limits.db", "b"),
        )
        yield stores
    else:
        socket = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = socket.sockets[0].getsockname()[1]
        socket.close()
        await socket.wait_closed()
        server = await asyncio.create_subprocess_exec(
            *("redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"),
            cwd=folder,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            stores = RedisStore(f"redis://127.0.0.1:{port}/1", "a"), RedisStore(f"redis://127.0.0.1:{port}/1", "b")
            async with asyncio.timeout(60):
                while True:
                    try:
                        await stores[0].beat()
                        break
                    except StoreLost:
                        await asyncio.sleep(0.05)
            yield stores
        finally:
            server.kill()
            await server.wait()
    for store in stores:
        await store.close()


KINDS = ["sqlite", pytest.param("redis", marks=[NEEDS_REDIS, pytest.mark.live])]


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_exact_over_two_gateways(kind: str, tmp_path: Path) -> None:
    async def check() -> None:
        async with two_stores(kind, tmp_path) as (one, other):
            await asyncio.gather(one.beat(), other.beat())
            demand = Demand("acme", 10, 5, 1000)
            found = await asyncio.gather(*(store.reserve(demand) for store in (one, other) for _ in range(8)))
            admitted = [verdict for verdict in found if verdict.is_admitted]
            assert len(admitted) == 5
            assert {verdict.num_open for verdict in found if not verdict.is_admitted} == {5}
            at = found.index(admitted[0])
            admitting, refusing = (one, other) if at < 8 else (other, one)
            await admitting.release("acme", admitted[0].second, 0)
            assert (await refusing.reserve(demand)).is_admitted

    asyncio.run(check())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_minute_are_shared_and_given_back(kind: str, tmp_path: Path) -> None:
    async def check() -> None:
        async with two_stores(kind, tmp_path) as (one, other):
            first = await one.reserve(Demand("acme", 70, 0, 100))
            refused = await other.reserve(Demand("acme", 40, 0, 100))
            assert (first.is_admitted, refused.is_admitted, refused.spent) == (True, False, 70)
            assert 1 <= refused.wait_s <= 60
            await one.release("acme", first.second, 60)
            assert (await other.reserve(Demand("acme", 40, 0, 100))).is_admitted
            assert (await other.reserve(Demand("other", 40, 0, 100))).is_admitted

    asyncio.run(check())


@pytest.mark.parametrize("kind", KINDS)
def test_money_is_owed_to_all_gateways(kind: str, tmp_path: Path) -> None:
    async def check() -> None:
        async with two_stores(kind, tmp_path) as (one, other):
            assert await one.owed("acme", 1e-6) == 0.0
            await asyncio.gather(*(store.spend("acme", 0.25, 1e-6) for store in (one, other) for _ in range(4)))
            assert await other.owed("acme", 1e-6) == pytest.approx(2.0)
            assert await other.owed("acme", 1e9) < 2.0, "the budget refills"

    asyncio.run(check())


def test_changes_that_wait_are_written_together(tmp_path: Path) -> None:
    times: list[float] = []

    def clock() -> float:
        times.append(1000.0)  # Read once for each transaction.
        return 1000.0

    async def check() -> None:
        store = SqliteStore(tmp_path / "limits.db", "a", clock)
        await store.beat()
        times.clear()
        demand = Demand("acme", 10, 40, 0)
        found = await asyncio.gather(*(store.reserve(demand) for _ in range(64)))
        assert [one.is_admitted for one in found] == [True] * 40 + [False] * 24
        left = asyncio.ensure_future(store.release("acme", 1000, 0))
        freed = asyncio.ensure_future(store.reserve(demand))
        await asyncio.sleep(0)
        left.cancel()  # Its change is written all the same, and before the next one.
        assert (await freed).is_admitted
        assert len(times) <= 6
        waiting = [asyncio.ensure_future(store.release("acme", 1000, 0)) for _ in range(8)]
        await asyncio.sleep(0)
        await store.close()
        assert all(one.done() for one in waiting)

    asyncio.run(check())


def test_every_change_of_a_transaction_that_fails_is_told_so() -> None:
    async def check() -> None:
        store = SqliteStore(Path("/dev/full/limits.db"), "a")
        found = await asyncio.gather(
            *(store.reserve(Demand("a", 1, 1, 1)) for _ in range(5)), store.beat(), return_exceptions=True
        )
        assert [type(one) for one in found] == [StoreLost] * 6
        await store.close()

    asyncio.run(check())


def test_requests_of_a_dead_gateway_do_not_count_for_long(tmp_path: Path) -> None:
    clock = FakeClock()

    async def check() -> None:
        one, other = (SqliteStore(tmp_path / "limits.db", name, clock) for name in "ab")
        demand = Demand("acme", 1, 1, 0)
        assert (await one.reserve(demand)).is_admitted
        assert not (await other.reserve(demand)).is_admitted
        clock.now += LEASE_S + 1
        await other.beat()
        assert (await other.reserve(demand)).is_admitted
        await asyncio.gather(one.close(), other.close())

    asyncio.run(check())


def test_after_a_start_of_the_machine_only_debts_stand(tmp_path: Path) -> None:
    """Its monotonic clock begins anew, so earlier times mean nothing."""
    clock = FakeClock()

    async def check() -> None:
        clock.now = 5000.0
        before = SqliteStore(tmp_path / "limits.db", "a", clock)
        assert (await before.reserve(Demand("acme", 100, 1, 100))).is_admitted
        await before.spend("acme", 2.0, 1.0)
        await before.close()
        with sqlite3.connect(tmp_path / "limits.db") as database:
            database.execute("UPDATE machine SET boot = 'an earlier one'")
        clock.now = 10.0
        after = SqliteStore(tmp_path / "limits.db", "b", clock)
        assert (await after.reserve(Demand("acme", 100, 1, 100))).is_admitted
        assert await after.owed("acme", 1.0) == 2.0
        clock.now += 1800
        assert await after.owed("acme", 1.0) == 1.5
        await after.close()

    asyncio.run(check())


def test_wait_is_until_enough_seconds_have_left_the_window() -> None:
    slots = [(100, 30), (110, 30), (120, 30)]
    assert verdict(Demand("a", 20, 0, 100), 0, slots, 130).wait_s == 30
    assert verdict(Demand("a", 50, 0, 100), 0, slots, 130).wait_s == 40
    assert verdict(Demand("a", 10, 0, 100), 0, slots, 130).is_admitted


class BrokenAtWill:
    """A store that can be lost."""

    def __init__(self, store: LimitStore) -> None:
        self.store, self.is_lost = store, False

    def __getattr__(self, name: str) -> object:
        if self.is_lost:

            async def lost(*arguments: object) -> None:
                raise StoreLost("the disk is full")

            return lost
        return getattr(self.store, name)


def test_loss_of_the_store_leaves_local_limits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.gateway.limits.limits.RETRY_S", 0.01)
    tenant = Tenant(name="acme", max_concurrent=2)

    async def check() -> None:
        path = tmp_path / "limits.db"
        store = BrokenAtWill(SqliteStore(path, "a"))
        limits, other = Limits(store), Limits(SqliteStore(path, "b"))  # type: ignore[arg-type]
        limits.start()
        held = await limits.reserve(tenant, 1)
        elsewhere = await other.reserve(tenant, 1)
        with pytest.raises(QuotaExceeded, match="has 2 open requests; its limit is 2"):
            await limits.reserve(tenant, 1)
        assert limits.scope == "shared"
        store.is_lost = True
        own = await limits.reserve(tenant, 1)  # Its second one; that of the other gateway is unknown.
        with pytest.raises(QuotaExceeded):
            await limits.reserve(tenant, 1)
        assert (limits.scope, limits.lost_reason) == ("local", "the disk is full")
        assert "is lost: the disk is full" in caplog.text
        await held.release(1)
        await limits.spend("acme", 3.0, 0.0)
        assert await limits.owed("acme", 0.0) is None
        store.is_lost = False
        await until(lambda: limits.scope == "shared")
        assert await other.owed("acme", 0.0) == 3.0, "debts are handed in later"
        await own.release(1)
        await elsewhere.release(1)
        again = [await one.reserve(tenant, 1) for one in (limits, other)]
        assert len(again) == 2, "the releases too"
        await limits.close()
        await other.close()

    asyncio.run(check())


def test_full_disk_is_a_lost_store() -> None:
    async def check() -> None:
        store = SqliteStore(Path("/dev/full/limits.db"), "a")
        with pytest.raises(StoreLost, match="/dev/full"):
            await store.reserve(Demand("a", 1, 1, 1))
        await store.close()

    asyncio.run(check())


def test_redis_that_does_not_answer_is_lost() -> None:
    async def check() -> None:
        store = RedisStore("redis://127.0.0.1:1", "a")
        with pytest.raises(StoreLost, match=r"redis at 127\.0\.0\.1:1"):
            await store.beat()

    asyncio.run(check())


def test_without_a_store_limits_are_local() -> None:
    async def check() -> None:
        limits = Limits(store_named(""))
        tenant = Tenant(name="a", tokens_per_minute=10)
        with pytest.raises(BadRequest, match="may use 11 tokens"):
            await limits.reserve(tenant, 11)
        held = await limits.reserve(tenant, 10)
        with pytest.raises(QuotaExceeded):
            await limits.reserve(tenant, 1)
        await held.release(2)
        await limits.reserve(tenant, 8)
        assert limits.scope == "local"

    asyncio.run(check())


@pytest.mark.parametrize("where", ["sqlite:", "mysql://a", "redis://", "redis://host/name"])
def test_unknown_store_is_named(where: str) -> None:
    with pytest.raises(ConfigError, match="limits_store is|is not redis"):
        store_named(where)
