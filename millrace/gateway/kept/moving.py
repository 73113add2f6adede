"""What a request refers to (a session, stored responses, a conversation) is read before the request is sent, so that
another replica can get it if the one that holds it is lost meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web
from yarl import URL

from millrace.gateway.kept.finding import ASK_S, asker_of, replica_headers
from millrace.gateway.replica import Replica
from millrace.gateway.state import GatewayState
from millrace.gateway.upstream import LOST

ROOMS = ("sessions", "responses", "conversations")
MAX_BYTES = 64 << 20
"""What is larger stays where it is."""
_OCTETS = "application/octet-stream"


class _Named(msgspec.Struct):
    names: list[str]


_names = msgspec.msgpack.Decoder(_Named)


class Past:
    """What one request refers to, as it was before the request."""

    def __init__(self, state: GatewayState, request: web.Request, home: str, data: bytes) -> None:
        self._state = state
        self._request = request
        self._data = data
        self._home = home
        """The replica at which it goes on."""
        self._names = _names.decode(data).names

    async def bring(self, replica: Replica) -> str:
        """Give it to a replica that is about to get the request. Returns why that failed, or nothing."""
        if replica.name == self._home:
            return ""
        if not replica.is_millrace:
            return "it cannot keep what this request refers to"
        if self._names[0] in replica.forgetting:
            return "it is just removing an old copy"
        first = self._names[0]
        had = replica.to_forget.pop(first, None)
        if problem := await self._put_in(replica):
            if had is not None:
                replica.to_forget[first] = had
            return f"it did not take {first}: {problem}"
        for name in self._names:
            self._state.homes.put(asker_of(self._request), name, replica.name)
        self._leave_nothing_at(self._home)
        self._home = replica.name
        return ""

    async def _put_in(self, replica: Replica) -> str:
        url, headers = replica.settings.url + "/v1/stored", {**self._headers(), "Content-Type": _OCTETS}
        try:
            async with (
                asyncio.timeout(ASK_S),
                self._state.session.post(url, data=self._data, headers=headers) as answer,
            ):
                return "" if answer.status == 200 else (await answer.text(errors="replace"))[:200]
        except LOST as error:
            return str(error) or type(error).__name__

    def _leave_nothing_at(self, name: str) -> None:
        """A session or conversation goes on at one replica only. Responses never change, and others there may continue
        them."""
        replica = self._state.fleet.replicas.get(name)
        if replica is not None and not self._names[0].startswith("responses/"):
            replica.to_forget[self._names[0]] = self._headers()

    def _headers(self) -> dict[str, str]:
        return replica_headers(self._state, self._request)


async def past_of(state: GatewayState, request: web.Request, stored: str, home: str) -> Past | None:
    """None if the replica cannot give it: then the request waits for that replica."""
    replica = state.fleet.replicas.get(home)
    if replica is None or not replica.is_millrace or stored.partition("/")[0] not in ROOMS:
        return None
    url = URL(f"{replica.settings.url}/v1/stored").with_query(at=stored)
    try:
        async with (
            asyncio.timeout(ASK_S),
            state.session.get(url, headers=replica_headers(state, request)) as answer,
        ):
            if answer.status != 200 or (answer.content_length or 0) > MAX_BYTES:
                return None
            return Past(state, request, home, await answer.read())
    except (*LOST, msgspec.DecodeError):
        return None
