"""Watches the replicas: probes, models, KV events, stalled and slow ones. A lost replica's streams move at once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import msgspec

from millrace.gateway.fleet import Fleet
from millrace.gateway.foreign import probe_path, read_report
from millrace.gateway.replica import Replica
from millrace.gateway.routing.model_list import ModelList
from millrace.gateway.upstream import own_headers
from millrace.gateway.watch.catching_up import CatchUp, forget_old

log = logging.getLogger("millrace.gateway")
MODELS_EVERY = 10
"""Probes between two looks at the models."""
NO_EVENTS_RETRY_S = 30.0
EVENTS_RETRY_S = 1.0
PROBES_LOST = 2
"""Probes in a row without an answer that mean a replica is lost."""
_NOT_FOR_US = (401, 403, 404)
_MAX_EVENT_BYTES = 64 << 20


class _KvEvent(msgspec.Struct):
    seq: int
    kind: str
    tier: str = "device"
    blocks: list[str] = msgspec.field(default_factory=list)
    block_tokens: int = 0


class Watch:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self.session = session
        self.adapters = CatchUp(fleet, session)
        self._tick: asyncio.Task[None] | None = None
        self.block_tokens: dict[str, int] = {}
        """Tokens per KV block of replicas that send events."""

    def start(self) -> None:
        for replica in self.fleet.replicas.values():
            self.follow(replica)
        self._tick = asyncio.create_task(self._check_often())

    def follow(self, replica: Replica) -> None:
        replica.tasks.append(asyncio.create_task(self._probe_often(replica)))
        if replica.is_millrace:
            replica.tasks.append(asyncio.create_task(self._follow_events(replica)))

    def unfollow(self, replica: Replica) -> None:
        for task in replica.tasks:
            task.cancel()
        replica.tasks.clear()

    async def close(self) -> None:
        for replica in self.fleet.replicas.values():
            self.unfollow(replica)
        if self._tick is not None:
            self._tick.cancel()

    # ── probes ────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _probe_often(self, replica: Replica) -> None:
        count = lost = 0
        while True:
            if not replica.health.share(self.fleet.clock()):
                replica.lacks_adapters = True
            problem = await self.probe(replica, with_models=count % MODELS_EVERY == 0)
            if not problem and replica.is_millrace and replica.lacks_adapters and await self.adapters.bring(replica):
                await self.probe(replica, with_models=True)
            if not problem and replica.to_forget:
                await forget_old(self.session, replica)
            count, lost = (count + 1, 0) if not problem else (0, lost + 1)
            if lost >= PROBES_LOST or (lost and "refused" in problem):
                self.lost(replica, problem)
            await asyncio.sleep(self.fleet.settings.probe_s)

    async def probe(self, replica: Replica, *, with_models: bool) -> str:
        """Ask the replica how it is. Returns the problem, or nothing."""
        was_lost = replica.health.share(self.fleet.clock()) == 0
        try:
            async with asyncio.timeout(self.fleet.settings.probe_timeout_s):
                await self._ask_load(replica)
                if with_models or was_lost:
                    await self._ask_models(replica)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"[:200] if str(error) else "it did not answer in time"
            return f"connection refused: {problem}" if _is_refused(error) else problem
        replica.health.succeeded(self.fleet.clock())
        return ""

    async def _ask_load(self, replica: Replica) -> None:
        path = probe_path(replica)
        async with self.session.get(replica.settings.url + path, headers=own_headers(self.fleet.settings)) as answer:
            body = await answer.read()
            if answer.status in _NOT_FOR_US and replica.is_millrace:
                await self._get(replica, "/ready")  # No report for this gateway's key, or a release without them.
            elif answer.status >= 400:
                raise ValueError(f"{path} answered {answer.status}")
            else:
                replica.load = read_report(replica, body)

    async def _ask_models(self, replica: Replica) -> None:
        url = replica.settings.url + "/v1/models"
        async with self.session.get(url, headers=own_headers(self.fleet.settings)) as answer:
            body = await answer.read()
            if answer.status == 200:
                replica.models = ModelList.parse(body)
            elif answer.status not in _NOT_FOR_US:
                raise ValueError(f"/v1/models answered {answer.status}")

    async def _get(self, replica: Replica, path: str) -> bytes:
        async with self.session.get(replica.settings.url + path, headers=own_headers(self.fleet.settings)) as answer:
            body = await answer.read()
            if answer.status >= 400:
                raise ValueError(f"{path} answered {answer.status}")
            return body

    def lost(self, replica: Replica, reason: str) -> None:
        """Send nothing more there, and move its streams."""
        if replica.health.state == "starting":
            replica.health.failed(self.fleet.clock(), reason)
        elif replica.health.eject(self.fleet.clock(), reason):
            log.warning("Replica %s is ejected: %s.", replica.name, reason)
        replica.give_up_all(reason)

    # ── stalled and slow replicas ─────────────────────────────────────────────────────────────────────────────────────
    async def _check_often(self) -> None:
        while True:
            await asyncio.sleep(self.fleet.settings.probe_s)
            for replica in self.fleet.find_stalled():
                self.lost(replica, "its streams stand still")
            self.fleet.give_up_silent()
            for replica in self.fleet.eject_slow():
                log.warning("Replica %s is ejected: %s.", replica.name, replica.health.reason)
            if self.fleet.rollout is not None and (change := self.fleet.rollout.check(self.fleet.clock())):
                log.warning("Rollout: %s.", change)
            self.fleet.decisions.flush()

    # ── KV events ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _follow_events(self, replica: Replica) -> None:
        prefixes = self.fleet.prefixes
        while True:
            wait_s = EVENTS_RETRY_S
            try:
                if not await self._read_events(replica):
                    wait_s = NO_EVENTS_RETRY_S
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, ValueError) as error:
                log.debug("KV events of %s: %s", replica.name, error)
            prefixes.unfollow(replica.name)
            await asyncio.sleep(wait_s)

    async def _read_events(self, replica: Replica) -> bool:
        """False if the replica has no events. Returns when the stream ends or numbers are missing."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.fleet.settings.connect_s)
        url = replica.settings.url + "/v1/kv/events"
        async with self.session.get(url, headers=own_headers(self.fleet.settings), timeout=timeout) as answer:
            if answer.status != 200:
                return False
            held = self.fleet.prefixes.follow(replica.name)
            rest = b""
            async for data in answer.content.iter_any():
                *frames, rest = (rest + data).split(b"\n\n")
                if len(rest) > _MAX_EVENT_BYTES:
                    raise ValueError("an event is too long")
                for event in map(_event_in, frames):
                    if event is None:
                        continue
                    self.block_tokens[replica.name] = event.block_tokens or self.block_tokens.get(replica.name, 0)
                    if not held.apply(event.seq, event.kind, event.tier, event.blocks):
                        return True
        return True


def _event_in(frame: bytes) -> _KvEvent | None:
    data = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
    return msgspec.json.decode(b"".join(data), type=_KvEvent) if data else None


def _is_refused(error: Any) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)
