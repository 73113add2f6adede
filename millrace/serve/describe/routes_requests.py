"""/v1/requests: list, describe, explain and cancel requests, on all fronts of the server.

A request's id is its X-Request-Id or the `id` of its answer. Running requests are known to their front; finished ones
are kept by the engine, the last `MAX_FINISHED_KEPT` of them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from aiohttp import web

from millrace.errors import EngineUnavailable, NotFound
from millrace.link.messages import MAX_FINISHED_KEPT
from millrace.params.classes import CLASS_NAMES
from millrace.serve.describe.cache_defeats import ADVICE, defeat_of
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query, page_of
from millrace.serve.http.siblings import is_for_sibling
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState, JobSummary
from millrace.serve.tenancy.owner import is_operator, owner_of

_CREDENTIALS = ("Authorization", "X-Api-Key")
MAX_LISTED = 10_000
_Model = ServedModel[FrontState]


class RunningRequest(msgspec.Struct):
    """A request that is generating."""

    id: str
    """The `id` of its answer."""
    object: Literal["request"]
    request_id: str
    """The header X-Request-Id."""
    tenant: str
    """Empty on a server that requires no keys."""
    path: str
    model: str
    created_at: int
    running_s: float
    stream: bool
    priority: str
    num_sequences: int
    prompt_tokens: int
    output_tokens: int
    """Generated so far."""
    awaits_engine: bool
    """True if its engine died: the next one continues it."""


class SequenceOutcome(msgspec.Struct):
    finish_reason: str | None
    message: str | None
    """The error, if it failed."""
    prompt_tokens: int
    output_tokens: int | None
    total_s: float


class RequestOutcome(msgspec.Struct):
    """A request that no front is generating any more, as the engine recorded it."""

    id: str
    object: Literal["request.outcome"]
    request_id: str
    state: Literal["waiting", "running", "ended"]
    """"ended", or for a moment an earlier state, while the engine is still being told to abort it."""
    priority: str
    sequences: list[SequenceOutcome]


class _ExplainedSequence(msgspec.Struct):
    """The parts of an explanation that an outcome takes over."""

    finish_reason: str | None
    message: str | None
    prompt_tokens: int
    output_tokens: int | None
    stages_s: dict[str, float]


class _Explanation(msgspec.Struct):
    id: str
    request_id: str
    state: Literal["waiting", "running", "ended"]
    priority: str
    sequences: list[_ExplainedSequence]


class RunningRequests(msgspec.Struct):
    object: Literal["list"]
    data: list[RunningRequest]
    """Longest running first."""
    total: int
    """How many are running; `limit` may have cut the list."""


class CancelledRequest(msgspec.Struct):
    object: Literal["request.cancelled"]
    id: str
    cancelled: bool
    """False if it had already ended."""
    sequences: int


def _describe(job: JobSummary) -> RunningRequest:
    return RunningRequest(
        job.answer_id,
        "request",
        job.request_id,
        job.owner,
        job.path,
        job.model,
        job.created,
        round(time.monotonic() - job.submitted_at, 3),
        job.stream,
        CLASS_NAMES[job.priority],
        job.num_sequences,
        job.prompt_tokens,
        job.output_tokens,
        job.awaits_engine,
    )


def _own_part(request: web.Request, limit: int) -> RunningRequests:
    """This front's requests: of the key's tenant, or of all tenants for an operator."""
    owner = None if is_operator(request) else owner_of(request)
    jobs = [job for job in request.app[STATE].jobs if owner is None or job.owner == owner]
    oldest = heapq.nsmallest(limit, jobs, key=lambda job: job.submitted_at)
    return RunningRequests("list", [_describe(job.summary()) for job in oldest], len(jobs))


async def _running(request: web.Request, limit: int = MAX_LISTED) -> RunningRequests:
    """The requests on all fronts; only this front's for a sibling."""
    running = _own_part(request, limit)
    if is_for_sibling(request):
        return running
    siblings = request.app[STATE].siblings
    for part in (await siblings.get(f"/v1/requests?limit={limit}", _credentials(request))).values():
        other = msgspec.json.decode(part, type=RunningRequests)
        running.data += other.data
        running.total += other.total
    running.data = sorted(running.data, key=lambda one: -one.running_s)[:limit]
    return running


def _credentials(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}


async def listing(request: web.Request) -> web.Response:
    check_query(request, ("limit", "front"))
    limit = page_of(request, most=MAX_LISTED, usual=MAX_LISTED).limit
    return json_answer(request, await _running(request, limit))


async def describe(request: web.Request) -> web.Response:
    wanted = request.match_info["request_id"]
    for one in (await _running(request)).data:
        if wanted in (one.id, one.request_id):
            return json_answer(request, one)
    return json_answer(request, _outcome(await _query(request, "explain")))


def _outcome(explanation: bytes) -> RequestOutcome:
    known = msgspec.json.decode(explanation, type=_Explanation)
    sequences = [
        SequenceOutcome(one.finish_reason, one.message, one.prompt_tokens, one.output_tokens, one.stages_s["total"])
        for one in known.sequences
    ]
    return RequestOutcome(known.id, "request.outcome", known.request_id, known.state, known.priority, sequences)


async def cancel(request: web.Request) -> web.Response:
    """End a running request with the error `request_cancelled`; an ended one stays as it is."""
    return json_answer(request, await _cancel_waiting(request) or await _query(request, "cancel"))


async def _cancel_waiting(request: web.Request) -> CancelledRequest | bytes | None:
    """Cancel a request that waits for an engine, which only its front knows. None: no front has one of this name."""
    state, name = request.app[STATE], request.match_info["request_id"]
    clients = [model.client for model in state.models if model.client.requests.is_waiting]
    if not clients:
        return None
    tenant = None if is_operator(request) else owner_of(request)
    num_cancelled = sum(client.cancel_waiting(name, tenant) for client in clients)
    if num_cancelled:
        return CancelledRequest("request.cancelled", name, True, num_cancelled)
    if is_for_sibling(request):
        return None
    answers = await state.siblings.delete(f"/v1/requests/{quote(name, safe='')}", _credentials(request))
    return next(iter(answers.values()), None)


async def explain(request: web.Request) -> web.Response:
    """Why it waited, what it found in the cache, whether it was preempted, and the time of each stage."""
    model, body = await _ask_engines(request, "explain")
    explanation = msgspec.json.decode(body)
    for sequence in explanation["sequences"]:
        _name_defeat(model.state, sequence["cache"])
    return json_answer(request, explanation)


def _name_defeat(state: FrontState | None, cache: dict[str, Any]) -> None:
    """Replace the tokens around the one where the prompt diverged by what stands there."""
    cache["defeated_by"] = None
    token_ids, first = cache.pop("around", None), cache.pop("around_from", 0)
    is_reordered = cache.pop("is_reordered", False)
    if token_ids is None or state is None:
        return
    before = state.tokenizer.decode(token_ids[: cache["diverged_at_token"] - first])
    kind = defeat_of(state.tokenizer.decode(token_ids), len(before), is_reordered=is_reordered)
    if kind is not None:
        cache["defeated_by"] = kind
        cache["why"] += " " + ADVICE[kind]


async def _query(request: web.Request, what: Literal["cancel", "explain"]) -> bytes:
    """The engine's reply, as JSON."""
    return (await _ask_engines(request, what))[1]


async def _ask_engines(request: web.Request, what: Literal["cancel", "explain"]) -> tuple[_Model, bytes]:
    """The model whose engine knows the request, and its engine's reply."""
    state, name = request.app[STATE], request.match_info["request_id"]
    tenant = None if is_operator(request) else owner_of(request)
    models = [model for model in state.models if model.status == "loaded"]
    if not models:
        state.require_engine()

    async def ask(model: _Model) -> tuple[_Model, bytes]:
        return model, await model.client.query(what, name, tenant)

    found = await _first_found([asyncio.ensure_future(ask(model)) for model in models])
    if found is None:
        raise NotFound(
            f"Request {name[:128]!r} is not running and not among the last {MAX_FINISHED_KEPT} that ended. A request's"
            " id is its header X-Request-Id or the 'id' of its answer.",
            param="request_id",
            code="request_not_found",
        )
    return found


async def _first_found(questions: Sequence[asyncio.Future[tuple[_Model, bytes]]]) -> tuple[_Model, bytes] | None:
    """The reply of the engine that knows the request; one that does not answer must not hide the others' requests."""
    failure: EngineUnavailable | None = None
    try:
        for question in asyncio.as_completed(questions):
            try:
                model, body = await question
            except EngineUnavailable as error:
                failure = error
                continue
            if body:
                return model, body
    finally:
        for question in questions:
            question.cancel()
    if failure is not None:
        raise failure
    return None
