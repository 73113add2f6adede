"""A replica that joins, or comes back, gets the adapters that clients added to the others and the models that they made
there. Until it lists one of them, requests for it go elsewhere."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import msgspec

from millrace.gateway.fleet import Fleet
from millrace.gateway.replica import Replica
from millrace.gateway.upstream import LOST, own_headers

log = logging.getLogger("millrace.gateway")
FORGET_S = 10.0


class _Adapter(msgspec.Struct):
    name: str
    model: str
    path: str | None = None
    is_added: bool = False


class _Adapters(msgspec.Struct):
    data: list[_Adapter]


class _Made(msgspec.Struct):
    """A model that a client made. What else makes it is passed on as it came."""

    name: str
    model: str
    digests: dict[str, str] = {}


class _Created(msgspec.Struct):
    data: list[msgspec.Raw]


class CatchUp:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session
        self.changing = asyncio.Lock()
        """Held while clients change adapters, so that none is brought back that is just being removed."""

    async def bring(self, replica: Replica) -> bool:
        """True if it was given something. It is tried again later while no other replica can be asked, or an answer is
        lost."""
        donors = [one for one in self._fleet.open_replicas() if one is not replica and one.is_millrace]
        if not donors:
            return False
        async with self.changing:
            try:
                wanted = await self._missing(replica, donors)
                for adapter in wanted:
                    await self._add(replica, adapter)
                num_made = await self._bring_made(replica, donors)
            except (*LOST, msgspec.DecodeError) as error:
                log.warning("Replica %s has not got what clients added to the others yet: %s.", replica.name, error)
                return False
        replica.lacks_adapters = False
        return bool(wanted) or num_made > 0

    async def _missing(self, replica: Replica, donors: list[Replica]) -> list[_Adapter]:
        """Only an operator's answer has paths."""
        found: dict[tuple[str, str], _Adapter] = {}
        for donor in donors:
            if not donor.models.has_adapters:
                continue
            status, body = await self._ask(donor, "GET")
            if status == 200:
                for one in msgspec.json.decode(body, type=_Adapters).data:
                    is_known = replica.models.find(f"{one.model}:{one.name}") is not None
                    if one.is_added and one.path and replica.models.find(one.model) is not None and not is_known:
                        found.setdefault((one.model, one.name), one)
        return list(found.values())

    async def _add(self, replica: Replica, adapter: _Adapter) -> None:
        body = {"name": adapter.name, "path": adapter.path, "model": adapter.model}
        status, answer = await self._ask(replica, "POST", body)
        if status < 300:
            log.info("Replica %s has got the adapter %s.", replica.name, adapter.name)
        elif status != 409:  # It has one of this name.
            log.warning(
                "Replica %s did not take the adapter %s, so requests for it go to others: it answered %d, %s",
                replica.name,
                adapter.name,
                status,
                answer[:500].decode(errors="replace"),
            )

    async def _bring_made(self, replica: Replica, donors: list[Replica]) -> int:
        """How many models that clients made it was given."""
        there = {made.name for made, _ in await self._made_at(replica)}
        num_given = 0
        for donor in donors:
            for made, definition in await self._made_at(donor) if donor.models.has_adapters else ():
                if made.name not in there and replica.models.find(made.model) is not None:
                    there.add(made.name)
                    num_given += await self._give_made(replica, donor, made, definition)
        return num_given

    async def _made_at(self, replica: Replica) -> list[tuple[_Made, bytes]]:
        """Only an operator's answer has them."""
        status, body = await self._ask(replica, "GET", path="/v1/created")
        found = msgspec.json.decode(body, type=_Created).data if status == 200 else []
        return [(msgspec.json.decode(one, type=_Made), bytes(one)) for one in found]

    async def _give_made(self, replica: Replica, donor: Replica, made: _Made, definition: bytes) -> bool:
        for digest in made.digests.values():
            if (await self._ask(replica, "HEAD", path=f"/api/blobs/{digest}"))[0] == 404:
                await self._copy_file(replica, donor, digest)
        status, answer = await self._ask(replica, "POST", msgspec.json.decode(definition), "/v1/created")
        if status < 300:
            log.info("Replica %s has got the model %s.", replica.name, made.name)
        else:
            log.warning(
                "Replica %s did not take the model %s, so requests for it go to others: it answered %d, %s",
                replica.name,
                made.name,
                status,
                answer[:500].decode(errors="replace"),
            )
        return status < 300

    async def _copy_file(self, replica: Replica, donor: Replica, digest: str) -> None:
        """If it does not succeed, the model is refused, and the log says so."""
        settings = self._fleet.settings
        source, target = f"{donor.settings.url}/v1/created/files/{digest}", f"{replica.settings.url}/api/blobs/{digest}"
        async with (
            asyncio.timeout(settings.answer_s),
            self._session.get(source, headers=own_headers(settings)) as file,
        ):
            if file.status == 200:
                async with self._session.post(target, data=file.content, headers=own_headers(settings)) as answer:
                    await answer.read()

    async def _ask(
        self, replica: Replica, method: str, body: dict[str, Any] | None = None, path: str = "/v1/adapters"
    ) -> tuple[int, bytes]:
        settings = self._fleet.settings
        async with (
            asyncio.timeout(settings.answer_s),
            self._session.request(
                method, f"{replica.settings.url}{path}", json=body, headers=own_headers(settings)
            ) as answer,
        ):
            return answer.status, await answer.read()


async def forget_old(session: aiohttp.ClientSession, replica: Replica) -> None:
    """Remove from a replica that is back what went on elsewhere."""
    for name, headers in list(replica.to_forget.items()):
        if replica.to_forget.pop(name, None) is None:
            continue
        replica.forgetting.add(name)
        try:
            async with (
                asyncio.timeout(FORGET_S),
                session.delete(f"{replica.settings.url}/v1/{name}", headers=headers) as answer,
            ):
                if answer.status not in (200, 404):
                    log.warning("Replica %s keeps an old copy of %s: %d.", replica.name, name, answer.status)
        except LOST:
            replica.to_forget.setdefault(name, headers)
        finally:
            replica.forgetting.discard(name)
