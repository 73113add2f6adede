"""/v1/kv/events: which KV blocks are cached, for gateways that send a prompt where its prefix is. /v1/kv/blocks: the
blocks of a prompt, for other replicas of the same fleet. /v1/kv/tree: what is cached where, for people who operate it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, Forbidden
from millrace.link.messages import KV_KEY_BYTES, KvEvents
from millrace.serve.describe.asked_model import asked_model, loaded_engine
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import read_body
from millrace.serve.http.event_stream import SERVER_SENT_EVENTS, comment
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import encode, json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.state import STATE
from millrace.serve.tenancy.block_ticket import LIFE_S, TICKET_HEADER, covers, is_valid
from millrace.serve.tenancy.owner import is_operator
from millrace.serve.tenancy.trust import is_gateway

PING_EVERY_S = 5.0
MAX_NODES = 2000
Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class KvEvent(msgspec.Struct, frozen=True):
    seq: int
    """One more than that of the event before."""
    kind: Literal["snapshot", "filled", "evicted", "cleared"]
    tier: Tier
    blocks: list[str]
    """The first 16 hex digits of each block's key."""
    block_tokens: int


async def events(request: web.Request) -> web.StreamResponse:
    """Writing waits for the client, and what waits for a slow one is bounded."""
    state = request.app[STATE]
    check_query(request, ("model",))
    _check_trust(request, "KV events show what all tenants ask")
    model = asked_model(request)
    block_tokens = loaded_engine(request, model).block_size
    response = web.StreamResponse(
        headers={
            "Content-Type": SERVER_SENT_EVENTS,
            "Cache-Control": "no-cache",
            REQUEST_ID_HEADER: request[REQUEST_ID],
            "Server": "millrace",
        }
    )
    await response.prepare(request)
    listener, seq = model.client.kv.add(), 0
    try:
        while not state.draining:
            try:
                event = await asyncio.wait_for(listener.next(), PING_EVERY_S)
            except TimeoutError:
                await response.write(comment("no changes"))
                continue
            for tier in TIERS if event.kind == "cleared" else (event.tier,):
                seq += 1
                await response.write(b"data: %b\n\n" % encode(_shown(event, seq, tier, block_tokens)))
    finally:
        model.client.kv.remove(listener)
    return response


def _shown(event: KvEvents, seq: int, tier: Tier, block_tokens: int) -> KvEvent:
    keys, step = event.keys.hex(), 2 * KV_KEY_BYTES
    blocks = [keys[start : start + step] for start in range(0, len(keys), step)]
    return KvEvent(seq, event.kind, tier, blocks, block_tokens)


async def tree(request: web.Request) -> web.Response:
    """Lengths, states and ages, never text."""
    check_query(request, ("nodes", "model"))
    if not is_operator(request):
        raise Forbidden("The prefix tree shows what all tenants have in the cache; use an operator's key.")
    raw = request.query.get("nodes", "200")
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 6 and 1 <= int(raw) <= MAX_NODES):
        raise BadRequest(f"nodes is {raw[:80]!r}; send a whole number from 1 to {MAX_NODES}.", param="nodes")
    model = asked_model(request)
    ready = loaded_engine(request, model)
    reply = await model.client.query("block_map", raw, None)
    if not reply:
        raise BadRequest(f"The model {model.name!r} has no KV cache.", param="model")
    shown = {"object": "kv.tree", "model": model.name, "block_tokens": ready.block_size}
    return json_answer(request, shown | msgspec.json.decode(reply))


async def blocks(request: web.Request) -> web.Response:
    """A part of a prompt's blocks, or how many of them are cached."""
    check_query(request, ("model",))
    state, ticket = request.app[STATE], request.headers.get(TICKET_HEADER)
    key, name = state.config.server.gateway_key, request.query.get("model", "")
    if ticket is None:
        _check_trust(request, "KV blocks belong to all tenants")
    elif not is_valid(ticket, name, key, time.time()):
        raise Forbidden(
            "The ticket of this question is not valid: replicas need the same --gateway-key, and clocks that differ by"
            f" less than {LIFE_S:g} s."
        )
    model = asked_model(request)
    loaded_engine(request, model)
    asked = await read_body(request, state.body_limit_bytes)
    if ticket is not None and not covers(ticket, asked):
        raise Forbidden("The ticket is for another question.")
    given = await state.block_source.give(model.client, asked, state.config.server.gateway_key)
    headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace"}
    return web.Response(body=given, content_type="application/octet-stream", headers=headers)


def _check_trust(request: web.Request, why: str) -> None:
    state = request.app[STATE]
    server = state.config.server
    if not is_gateway(request, server.host, server.gateway_key, has_keys=state.keyring is not None):
        raise Forbidden(f"{why}; use an operator's key or --gateway-key.")
