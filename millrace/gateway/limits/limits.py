"""Quotas and budgets of a gateway: exact with the others through the shared store, its own alone while that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from millrace.errors import ConfigError
from millrace.gateway.limits.redis_store import RedisStore
from millrace.gateway.limits.sqlite_store import SqliteStore
from millrace.gateway.limits.store import LEASE_S, Demand, LimitStore, StoreLost, Verdict
from millrace.serve.tenancy.keyring import Tenant
from millrace.serve.tenancy.quotas import (
    Quotas,
    Reservation,
    check_size,
    hold,
    reserve,
    too_many_open,
    too_many_tokens,
)

log = logging.getLogger("millrace.gateway")
RETRY_S = 1.0
MAX_OWING = 65_536
"""Releases kept for a store that is lost; more than that are covered by the window of a minute."""


def store_named(where: str) -> LimitStore | None:
    """`sqlite:PATH`, `redis://…`, or nothing."""
    gateway = secrets.token_hex(8)
    if not where:
        return None
    kind, _, rest = where.partition(":")
    if kind == "sqlite" and rest:
        return SqliteStore(Path(rest).expanduser(), gateway)
    if kind in ("redis", "rediss"):
        return RedisStore(where, gateway)
    raise ConfigError(f"limits_store is {where!r}; it must be sqlite:PATH or redis://HOST:PORT.", param="limits_store")


class Held:
    """What a request holds of its tenant's quotas until `release`, which may be called once."""

    def __init__(self, limits: Limits, tenant: Tenant, tokens: int, local: Reservation, second: int | None) -> None:
        self._limits = limits
        self._tenant = tenant
        self._tokens = tokens
        self._local = local
        self._second = second

    async def release(self, used: int) -> None:
        self._local.release(used)
        if self._second is not None:
            await self._limits.released(self._tenant.name, self._second, self._tokens - used)


class Limits:
    def __init__(self, store: LimitStore | None, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._wall_clock = wall_clock
        self._own = Quotas()
        """Of this gateway's requests alone; kept all the time, for when the store is lost."""
        self.lost_reason = ""
        """Why limits are local now; empty while they are shared."""
        self._owing: deque[tuple[str, int, int]] = deque(maxlen=MAX_OWING)
        """Releases that the store did not hear of."""
        self._debts: dict[str, tuple[float, float]] = {}
        """By tenant, money that it did not hear of, and the tenant's budget per hour."""
        self._beating: asyncio.Task[None] | None = None

    @property
    def scope(self) -> str:
        """shared: exact over all gateways; local: each gateway counts alone."""
        return "local" if self._store is None or self.lost_reason else "shared"

    def start(self) -> None:
        if self._store is not None:
            self._beating = asyncio.create_task(self._beat_often(self._store))

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self._store is not None:
            with contextlib.suppress(StoreLost):
                await self._store.close()

    # ── quotas ────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def reserve(self, tenant: Tenant, tokens: int) -> Held:
        """Hold one request and its tokens, or raise with the time to retry."""
        is_limited = tenant.max_concurrent or tenant.tokens_per_minute
        if self._store is not None and not self.lost_reason and is_limited:
            check_size(tenant, tokens)
            demand = Demand(tenant.name, tokens, tenant.max_concurrent, tenant.tokens_per_minute)
            try:
                found = await self._ask(self._store, demand)
            except StoreLost as error:
                self._lose(error)
            else:
                if found.num_open:
                    raise too_many_open(tenant, found.num_open)
                if not found.is_admitted:
                    raise too_many_tokens(tenant, found.spent, tokens, found.wait_s)
                return Held(self, tenant, tokens, hold(self._own, tenant, tokens, self._wall_clock()), found.second)
        return Held(self, tenant, tokens, reserve(self._own, tenant, tokens, self._wall_clock()), None)

    async def _ask(self, store: LimitStore, demand: Demand) -> Verdict:
        """A client that leaves meanwhile leaves nothing held."""
        asking = asyncio.ensure_future(store.reserve(demand))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda done: self._forget(demand, done))
            raise

    def _forget(self, demand: Demand, done: asyncio.Future[Verdict]) -> None:
        if not done.cancelled() and done.exception() is None and done.result().is_admitted:
            self._owing.append((demand.tenant, done.result().second, demand.tokens))

    async def released(self, tenant: str, second: int, refund: int) -> None:
        if self._store is not None and not self.lost_reason:
            try:
                return await self._store.release(tenant, second, refund)
            except StoreLost as error:
                self._lose(error)
        self._owing.append((tenant, second, refund))

    # ── budgets ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def owed(self, tenant: str, per_hour: float) -> float | None:
        """What the tenant owes over all gateways; None if only this gateway's own view is known."""
        if self._store is None or self.lost_reason:
            return None
        try:
            return await self._store.owed(tenant, per_hour)
        except StoreLost as error:
            self._lose(error)
            return None

    async def spend(self, tenant: str, amount: float, per_hour: float) -> None:
        if self._store is None:
            return
        if not self.lost_reason:
            try:
                return await self._store.spend(tenant, amount, per_hour)
            except StoreLost as error:
                self._lose(error)
        self._debts[tenant] = self._debts.get(tenant, (0.0, per_hour))[0] + amount, per_hour

    # ── the store's loss and return ───────────────────────────────────────────────────────────────────────────────────
    def _lose(self, error: StoreLost) -> None:
        if not self.lost_reason:
            log.error("The store of limits is lost: %s. Until it is back, this gateway counts its own requests.", error)
        self.lost_reason = str(error)

    async def _beat_often(self, store: LimitStore) -> None:
        while True:
            try:
                await store.beat()
                while self._owing:
                    await store.release(*self._owing[0])
                    self._owing.popleft()
                for tenant, (amount, per_hour) in list(self._debts.items()):
                    await store.spend(tenant, amount, per_hour)
                    del self._debts[tenant]
                if self.lost_reason:
                    log.warning("The store of limits is back: limits hold over all gateways again.")
                self.lost_reason = ""
            except StoreLost as error:
                self._lose(error)
            await asyncio.sleep(RETRY_S if self.lost_reason else LEASE_S / 3)
