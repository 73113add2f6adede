"""Finds the replica that holds something stored."""

from __future__ import annotations

import asyncio
import hashlib
from urllib.parse import quote

import msgspec
from aiohttp import web

from millrace.gateway.replica import Replica
from millrace.gateway.state import GatewayState
from millrace.gateway.upstream import LOST, own_headers
from millrace.serve.tenancy.access import key_in
from millrace.serve.tenancy.owner import OWNER_HEADER, owner_of, tenant_of

ASK_S = 10.0


class _Session(msgspec.Struct):
    turns: int = 0


def asker_of(request: web.Request) -> str:
    """Whose names are meant: the tenant, or, where only replicas know tenants, the key."""
    key = key_in(request)
    return owner_of(request) or (hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest() if key else "")


async def home_of(state: GatewayState, request: web.Request, stored: str) -> str:
    """The replica that holds `ROOM/ID`; empty if none is known to. Another gateway may have created it: then every
    replica is asked."""
    if not stored:
        return ""
    who = asker_of(request)
    known = state.homes.get(who, stored)
    if known in state.fleet.replicas:
        return known
    asked = [one for one in state.fleet.replicas.values() if one.is_millrace and one.health.share(state.fleet.clock())]
    turns = await asyncio.gather(*(_turns_at(state, request, one, stored) for one in asked))
    most = max(turns, default=-1)
    if most < 0:
        return ""
    home = asked[turns.index(most)].name
    state.homes.put(who, stored, home)
    return home


async def _turns_at(state: GatewayState, request: web.Request, replica: Replica, stored: str) -> int:
    """-1 if it is not there. Of a session that was moved, the replica with more turns has what is newer; other things
    have no turns."""
    room, _, name = stored.rpartition("/")
    url = f"{replica.settings.url}/v1/{room}/{quote(name, safe='')}"
    try:
        async with (
            asyncio.timeout(ASK_S),
            state.session.get(url, headers=replica_headers(state, request)) as answer,
        ):
            if answer.status != 200:
                return -1
            if room != "sessions":
                return 0
            return max(0, int(msgspec.json.decode(await answer.read(), type=_Session).turns))
    except (*LOST, msgspec.DecodeError):
        return -1


def replica_headers(state: GatewayState, request: web.Request) -> dict[str, str]:
    """The credentials for a question of the gateway on behalf of a client."""
    given = {name: request.headers[name] for name in ("Authorization", "X-Api-Key") if name in request.headers}
    owner = state.owner_of(tenant_of(request))
    named = {OWNER_HEADER: owner} if owner else {}
    return {**({} if state.settings.replica_key else given), **named, **own_headers(state.settings)}
