"""The API of a server, passed on to replicas: generating requests, and everything else by where it is stored."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import msgspec
from aiohttp import web

from millrace.errors import EngineUnavailable, MillraceError
from millrace.gateway.auto_model import with_model
from millrace.gateway.kept.batch_lines import check_lines
from millrace.gateway.kept.finding import asker_of, home_of, replica_headers
from millrace.gateway.kept.moving import past_of
from millrace.gateway.limits.limits import Held
from millrace.gateway.limits.usage import UsageReader
from millrace.gateway.relay import CLIENT_STALL_S, ClientGone, StreamRelay, outcome_of, refusal_answer, relay_whole
from millrace.gateway.replica_http.connection import Answer
from millrace.gateway.routing.candidates import Asked
from millrace.gateway.routing.homes import stored_as, stored_at
from millrace.gateway.routing.request_facts import RequestFacts, computes, facts_of, is_own_path, is_turn, named_model
from millrace.gateway.state import STATE, GatewayState
from millrace.gateway.upstream import (
    LOST,
    REPLICA_HEADER,
    Opened,
    Payload,
    Refusal,
    Sender,
    answer_headers,
)
from millrace.model_router.router import AUTO
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import read_any_body, read_body
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.owner import owner_of, tenant_of

_CREATED = re.compile(rb'"id": ?"([^"\\]{1,128})"')
_MAX_WHOLE_BYTES = 1 << 20
"""Answers up to this size are read to find what they created."""


@dataclass
class Used:
    """Tokens that a request used: what its answer says, else what was estimated."""

    prompt: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.output

    def read(self, answer: web.StreamResponse, asked: Asked) -> None:
        """Errors use nothing."""
        usage = UsageReader()
        if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            usage.read(answer.body)
        if answer.status != 200:
            self.prompt = 0
        elif usage.prompt_tokens:
            self.prompt, self.output = usage.prompt_tokens, usage.output_tokens
        else:
            self.output = asked.output_tokens


async def generate(request: web.Request) -> web.StreamResponse:
    """A request that computes: routed by the policy, retried and resumed."""
    state, request_id = request.app[STATE], request[REQUEST_ID]
    if state.is_draining:
        raise EngineUnavailable("This gateway is shutting down; send the request again.")
    raw = await read_body(request, state.settings.body_limit_mb << 20)
    tenant = owner_of(request)
    facts = facts_of(request.path, raw, request.headers, request_id, tenant, state.settings.long_tokens)
    if facts.asked.model or not is_turn(request.path):  # A turn goes on with the model of its session.
        state.check_model(tenant_of(request), facts.asked.model)
    record = state.fleet.decisions.begin(request_id, tenant)
    sender = Sender(state.fleet, state.client, request, request_id, facts, record)
    sender.salt, sender.owner = state.salt_of(tenant_of(request)), state.owner_of(tenant_of(request))
    sender.only = await home_of(state, request, facts.stored)
    _leave_out_others(sender)
    state.num_open += 1
    used = Used()
    try:
        held = await _hold(state, request, facts)
        try:
            raw = await _with_chosen_model(state, sender, tenant, raw)
            if sender.only and (past := await past_of(state, request, facts.stored, sender.only)) is not None:
                sender.bring = past.bring
            answer = await _answered(state, sender, raw, used)
            _learn(state, sender, answer)
            return answer
        except ClientGone:
            return web.Response(status=499)
        finally:
            if held is not None:
                await held.release(used.total)
            if record.model_choice is not None and state.auto is not None:
                await state.auto.spent(tenant, record.model_choice.model, used.total)
    finally:
        state.num_open -= 1


def _leave_out_others(sender: Sender) -> None:
    """Other servers do not have Millrace's own paths."""
    if is_own_path(sender.request.path):
        sender.tried |= {name for name, one in sender.fleet.replicas.items() if not one.is_millrace}


async def _hold(state: GatewayState, request: web.Request, facts: RequestFacts) -> Held | None:
    """The tenant's quota. Tokens are estimates until the answer says how many it used."""
    if state.keyring is None:
        return None
    return await state.limits.reserve(tenant_of(request), facts.asked.prompt_tokens + facts.asked.output_tokens)


async def _with_chosen_model(state: GatewayState, sender: Sender, tenant: str, raw: bytes) -> bytes:
    """The body, with the model that answers `model: "auto"`."""
    if state.auto is None or sender.facts.asked.model != AUTO:
        return raw
    choice = await state.auto.choose(sender, tenant)
    raw = with_model(sender.facts.body, choice.model)
    request = sender.request
    sender.facts = facts_of(request.path, raw, request.headers, sender.request_id, tenant, state.settings.long_tokens)
    return raw


async def _answered(state: GatewayState, sender: Sender, raw: bytes, used: Used) -> web.StreamResponse:
    """The answer; `used` gets the tokens, also those of a stream that its client left."""
    clock, record = state.fleet.clock, sender.record
    began, ended, relay = clock(), "abort", None
    try:
        if sender.facts.is_stream:
            relay = StreamRelay(sender, raw, lambda how: state.metrics.resumes.labels(how).inc())
            answer = await relay.run()
        else:
            used.prompt = sender.facts.asked.prompt_tokens
            answer = await relay_whole(sender, raw)
            used.read(answer, sender.facts.asked)
        ended = str(answer.status)
        _note_rollout(state, sender, answer, (relay.first_at if relay is not None else 0.0) or clock(), began)
        return answer
    except MillraceError as error:
        ended = error.code or error.type
        raise
    finally:
        if relay is not None and relay.num_frames:
            used.prompt, used.output = relay.used_tokens()
        first = relay.first_at if relay is not None else 0.0
        num_resumes = relay.num_resumes if relay is not None else 0
        state.fleet.decisions.ended(record, outcome_of(sender.request_id, sender, ended, began, first, num_resumes))
        _count(state, sender, first - began if first else 0.0)


def _note_rollout(
    state: GatewayState, sender: Sender, answer: web.StreamResponse, first_at: float, began: float
) -> None:
    """What the answer says of its side of a rollout; then a copy for shadow traffic."""
    replica = state.fleet.replicas.get(sender.record.decisions[-1].choice.replica)
    if replica is not None and state.fleet.rollout is not None:
        if answer.status >= 500:
            state.fleet.rollout.failed(replica.settings.group)
        elif answer.status == 200:
            state.fleet.rollout.answered(replica.settings.group, first_at - began)
    facts = sender.facts
    if state.shadow is not None and answer.status == 200 and not facts.stored:
        group = state.shadow.settings.group
        copies = [one for one in state.fleet.open_replicas() if one.settings.group == group]
        whole = answer.body if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else b""
        headers = replica_headers(state, sender.request) | ({SALT_HEADER: sender.salt} if sender.salt else {})
        took_s = state.fleet.clock() - began
        state.shadow.copy(copies, sender.request.path, facts.body, headers, sender.request_id, took_s, whole)


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


def _learn(state: GatewayState, sender: Sender, answer: web.StreamResponse) -> None:
    """What an answer says about its replica: what is stored there, and what is cached."""
    replica = state.fleet.replicas.get(sender.record.decisions[-1].choice.replica)
    if replica is not None and answer.status == 200:
        _note_home(state, sender.request, replica.name, answer)
        state.learner.learn(replica, sender.facts, sender.salt, replica_headers(state, sender.request))


def _note_home(state: GatewayState, request: web.Request, replica: str, answer: web.StreamResponse) -> None:
    if isinstance(answer, web.Response) and isinstance(answer.body, bytes) and answer.status == 200:
        created = _CREATED.search(answer.body[:4096])
        if created:
            stored = stored_as(request.path, created[1].decode(errors="replace"))
            state.homes.put(asker_of(request), stored, replica)


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Everything else goes to the replica that holds what the path names, or to any."""
    if request.method == "POST" and computes(request.path):
        return await generate(request)
    state, request_id = request.app[STATE], request[REQUEST_ID]
    raw = await read_any_body(request, state.settings.body_limit_mb << 20)
    facts = facts_of(request.path, raw, request.headers, request_id, owner_of(request), state.settings.long_tokens)
    if (model := named_model(request.path, facts)) is not None:
        state.check_model(tenant_of(request), model)
        facts = msgspec.structs.replace(facts, asked=msgspec.structs.replace(facts.asked, model=model))
    record = state.fleet.decisions.begin(request_id, owner_of(request))
    sender = Sender(state.fleet, state.client, request, request_id, facts, record)
    sender.salt, sender.owner = state.salt_of(tenant_of(request)), state.owner_of(tenant_of(request))
    sender.only = await home_of(state, request, stored_at(request.path) or facts.stored)
    _leave_out_others(sender)
    if request.path == "/v1/batches" and request.method == "POST":
        await check_lines(state, request, sender.only, facts.stored)
    opened = await sender.open(lambda replica: Payload(raw), "new")
    if isinstance(opened, Refusal):
        return refusal_answer(sender, opened)
    try:
        return await _pass_answer(state, sender, opened)
    finally:
        opened.close()


async def _pass_answer(state: GatewayState, sender: Sender, opened: Opened) -> web.StreamResponse:
    response = opened.response
    headers = answer_headers(response.headers)
    headers.update({REQUEST_ID_HEADER: sender.request_id, REPLICA_HEADER: opened.replica.name, "Server": "millrace"})
    length = response.content_length
    if length is not None and sender.request.method == "HEAD":
        headers["Content-Length"] = str(length)
        return web.Response(status=response.status, headers=headers)
    if length is not None and length <= _MAX_WHOLE_BYTES:
        body = await _read(response, state.settings.answer_s)
        whole = web.Response(status=response.status, body=body, headers=headers)
        _note_home(state, sender.request, opened.replica.name, whole)
        return whole
    answer = web.StreamResponse(status=response.status, headers=headers)
    await answer.prepare(sender.request)
    async for data in response.pieces(state.settings.answer_s):
        async with asyncio.timeout(CLIENT_STALL_S):
            await answer.write(data)
    await answer.write_eof()
    return answer


async def _read(response: Answer, limit_s: float) -> bytes:
    try:
        async with asyncio.timeout(limit_s):
            return await response.read()
    except LOST as error:
        raise EngineUnavailable(f"The replica was lost in its answer: {error}. Send the request again.") from error
