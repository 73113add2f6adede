"""The API of a server, passed on to replicas: generating requests, and everything else by where it is stored."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import quote

import aiohttp
from aiohttp import web

from millrace.errors import EngineUnavailable, MillraceError
from millrace.gateway.relay import ClientGone, StreamRelay, outcome_of, refusal_answer, relay_whole
from millrace.gateway.replica import Replica
from millrace.gateway.routing.decisions import RequestRecord
from millrace.gateway.routing.request_facts import EMBEDDING, GENERATING, RequestFacts, facts_of
from millrace.gateway.state import STATE, GatewayState
from millrace.gateway.upstream import (
    LOST,
    REPLICA_HEADER,
    Opened,
    Payload,
    Refusal,
    Sender,
    own_headers,
    passed_headers,
)
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import read_body
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.tenancy.owner import owner_of, tenant_of
from millrace.serve.tenancy.quotas import reserve

_STORED = re.compile(r"^/v1/(?:responses|chat/completions|conversations|files|batches|requests)/(?P<id>[^/]+)(?:/.*)?$")
_FIXED = frozenset({"input_tokens", "compact"})
_CREATED = re.compile(rb'"id": ?"([^"\\]{1,128})"')
_KINDS = (
    ("file", "files"),
    ("batch", "batches"),
    ("conv", "conversations"),
    ("resp", "responses"),
    ("chatcmpl", "chat/completions"),
)
"""First letters of ids, and where what they name is found."""
_MAX_WHOLE_BYTES = 1 << 20
"""Answers up to this size are read to find what they created."""


async def generate(request: web.Request) -> web.StreamResponse:
    """A request that computes: routed by the policy, retried and resumed."""
    state, request_id = request.app[STATE], request[REQUEST_ID]
    if state.is_draining:
        raise EngineUnavailable("This gateway is shutting down; send the request again.")
    raw = await read_body(request, state.settings.body_limit_mb << 20)
    tenant = owner_of(request)
    facts = facts_of(request.path, raw, request.headers, request_id, tenant, state.settings.long_tokens)
    record = state.fleet.decisions.begin(request_id, tenant)
    sender = Sender(state.fleet, state.session, request, request_id, facts, record)
    sender.only = await _home_of(state, request, facts.stored_id) if facts.stored_id else ""
    began, ended, relay = state.fleet.clock(), "abort", None
    with _quota(state, request, facts):
        try:
            if facts.is_stream:
                relay = StreamRelay(sender, raw, lambda how: state.metrics.resumes.labels(how).inc())
                answer = await relay.run()
            else:
                answer = await relay_whole(sender, raw)
            ended = str(answer.status)
            _learn(state, request, facts, record, answer)
            return answer
        except ClientGone:
            return web.Response(status=499)
        except MillraceError as error:
            ended = error.code or error.type
            raise
        finally:
            first = relay.first_at if relay is not None else 0.0
            num_resumes = relay.num_resumes if relay is not None else 0
            state.fleet.decisions.ended(record, outcome_of(request_id, sender, ended, began, first, num_resumes))
            _count(state, sender, first - began if first else 0.0)


def _quota(state: GatewayState, request: web.Request, facts: RequestFacts) -> AbstractContextManager[None]:
    """Holds the tenant's quota while the request is open. Tokens are estimates: the gateway has no tokenizer."""

    @contextmanager
    def held() -> Iterator[None]:
        state.num_open += 1
        tokens = facts.asked.prompt_tokens + facts.asked.output_tokens
        reservation = None
        try:
            if state.keyring is not None:
                reservation = reserve(state.quotas, tenant_of(request), tokens, time.time())
            yield
        finally:
            state.num_open -= 1
            if reservation is not None:
                reservation.release(tokens)

    return held()


def _count(state: GatewayState, sender: Sender, first_s: float) -> None:
    metrics = state.metrics
    for decision in sender.record.decisions:
        metrics.decisions.labels(decision.choice.replica, decision.cause).inc()
    if sender.record.decisions:
        first = sender.record.decisions[0]
        metrics.prompt.inc(first.asked.prompt_tokens)
        metrics.matched.inc(next(one.matched_tokens for one in first.candidates if one.name == first.choice.replica))
    if first_s:
        metrics.first_byte.observe(first_s)


def _learn(
    state: GatewayState, request: web.Request, facts: RequestFacts, record: RequestRecord, answer: web.StreamResponse
) -> None:
    """What an answer says about its replica: what is stored there, and what is cached."""
    replica = state.fleet.replicas.get(record.decisions[-1].choice.replica)
    if replica is not None and answer.status == 200:
        _note_home(state, replica.name, answer)
        state.learner.learn(replica, facts, replica_headers(state, request))


def _note_home(state: GatewayState, replica: str, answer: web.StreamResponse) -> None:
    if isinstance(answer, web.Response) and isinstance(answer.body, bytes) and answer.status == 200:
        created = _CREATED.search(answer.body[:4096])
        if created:
            state.homes.put(created[1].decode(errors="replace"), replica)


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Everything else goes to the replica that holds what the path names, or to any."""
    if request.method == "POST" and request.path in GENERATING | EMBEDDING:
        return await generate(request)
    state, request_id = request.app[STATE], request[REQUEST_ID]
    raw = await read_any_body(request, state.settings.body_limit_mb << 20)
    facts = facts_of(request.path, raw, request.headers, request_id, owner_of(request), state.settings.long_tokens)
    record = state.fleet.decisions.begin(request_id, owner_of(request))
    sender = Sender(state.fleet, state.session, request, request_id, facts, record)
    stored = _STORED.match(request.path)
    stored_id = stored["id"] if stored and stored["id"] not in _FIXED else facts.stored_id
    if stored_id:
        sender.only = await _home_of(state, request, stored_id)
    opened = await sender.open(lambda replica: Payload(raw), "new")
    if isinstance(opened, Refusal):
        return refusal_answer(sender, opened)
    try:
        return await _pass_answer(state, sender, opened)
    finally:
        opened.close()


async def read_any_body(request: web.Request, limit_bytes: int) -> bytes:
    """Uploads are not JSON; the replica checks what they are."""
    if request.content_type == "application/json":
        return await read_body(request, limit_bytes)
    pieces, total = [], 0
    while piece := await request.content.readany():
        total += len(piece)
        if total > limit_bytes:
            raise web.HTTPRequestEntityTooLarge(limit_bytes, total)
        pieces.append(piece)
    return b"".join(pieces)


async def _pass_answer(state: GatewayState, sender: Sender, opened: Opened) -> web.StreamResponse:
    response = opened.response
    headers = passed_headers(response.headers)
    headers.update({REQUEST_ID_HEADER: sender.request_id, REPLICA_HEADER: opened.replica.name, "Server": "millrace"})
    length = response.content_length
    if length is not None and length <= _MAX_WHOLE_BYTES:
        whole = web.Response(status=response.status, body=await _read(response), headers=headers)
        _note_home(state, opened.replica.name, whole)
        return whole
    answer = web.StreamResponse(status=response.status, headers=headers)
    await answer.prepare(sender.request)
    async for data in response.content.iter_any():
        await answer.write(data)
    await answer.write_eof()
    return answer


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except LOST as error:
        raise EngineUnavailable(f"The replica was lost in its answer: {error}. Send the request again.") from error


async def _home_of(state: GatewayState, request: web.Request, stored_id: str) -> str:
    """The replica that holds something stored. Another gateway may have created it: then every replica is asked."""
    known = state.homes.get(stored_id)
    if known in state.fleet.replicas:
        return known
    for replica in state.fleet.open_replicas():
        if replica.is_millrace and await _holds(state, request, replica, stored_id):
            state.homes.put(stored_id, replica.name)
            return replica.name
    return ""


async def _holds(state: GatewayState, request: web.Request, replica: Replica, stored_id: str) -> bool:
    room = next((room for prefix, room in _KINDS if stored_id.startswith(prefix)), "requests")
    url = f"{replica.settings.url}/v1/{room}/{quote(stored_id, safe='')}"
    try:
        async with state.session.get(url, headers=replica_headers(state, request)) as answer:
            return answer.status == 200
    except LOST:
        return False


def replica_headers(state: GatewayState, request: web.Request) -> dict[str, str]:
    """The credentials for a question of the gateway on behalf of a client."""
    given = {name: request.headers[name] for name in ("Authorization", "X-Api-Key") if name in request.headers}
    return {**({} if state.settings.replica_key else given), **own_headers(state.settings)}
