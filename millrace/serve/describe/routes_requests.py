"""/v1/requests: what the server generates now; and of any request of the server, an explanation or its end.

A request's id is X-Request-Id or the answer's own `id`.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from aiohttp import web

from millrace.errors import NotFound
from millrace.serve.describe.routes_info import json_answer
from millrace.serve.generate.job import Job
from millrace.serve.http.app_keys import STATE
from millrace.serve.http.siblings import is_for_sibling, parts_of_siblings
from millrace.serve.openai.schemas import PRIORITY_CLASSES
from millrace.serve.tenancy.gate import tenant_of
from millrace.serve.tenancy.owner import owner_of

_CREDENTIALS = ("Authorization", "X-Api-Key")
_CLASSES = {number: name for name, number in PRIORITY_CLASSES.items()}


class RunningRequest(msgspec.Struct):
    """A request that is generating."""

    id: str
    """The answer's id, as in the answer itself."""
    object: Literal["request"]
    request_id: str
    """As in the header X-Request-Id."""
    path: str
    created_at: int
    running_s: float
    stream: bool
    priority: str
    num_sequences: int
    prompt_tokens: int
    output_tokens: int
    """So far."""


class RunningRequests(msgspec.Struct):
    object: Literal["list"]
    data: list[RunningRequest]


class CancelledRequest(msgspec.Struct):
    object: Literal["request.cancelled"]
    id: str
    cancelled: bool
    """False where it had ended already."""
    sequences: int


def _describe(job: Job) -> RunningRequest:
    generation = job.generation
    return RunningRequest(
        generation.answer_id,
        "request",
        job.request_id,
        job.path,
        generation.created,
        round(time.monotonic() - job.submitted_at, 3),
        generation.stream,
        _CLASSES.get(generation.priority, str(generation.priority)),
        len(job.choices),
        sum(len(prompt.token_ids) for prompt in generation.prompts),
        sum(choice.num_tokens for choice in job.choices),
    )


def _visible(request: web.Request) -> list[Job]:
    owner = owner_of(request)
    return sorted((job for job in request.app[STATE].jobs if job.owner == owner), key=lambda job: job.submitted_at)


async def _running(request: web.Request) -> list[RunningRequest]:
    """Those of all fronts, the longest running first; of this one alone when another front asks."""
    running = [_describe(job) for job in _visible(request)]
    if is_for_sibling(request):
        return running
    credentials = {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}
    for part in (await parts_of_siblings(request.app[STATE], "/v1/requests", credentials)).values():
        running += msgspec.json.decode(part, type=RunningRequests).data
    return sorted(running, key=lambda one: -one.running_s)


async def listing(request: web.Request) -> web.Response:
    return json_answer(request, RunningRequests("list", await _running(request)))


async def describe(request: web.Request) -> web.Response:
    wanted = request.match_info["request_id"]
    for one in await _running(request):
        if wanted in (one.id, one.request_id):
            return json_answer(request, one)
    raise _not_found(wanted)


async def cancel(request: web.Request) -> web.Response:
    """Its stream or answer ends with the error `request_cancelled`; one that has ended already is left as it is."""
    return await _ask(request, "cancel")


async def explain(request: web.Request) -> web.Response:
    """Why it waited, what it found in the cache, whether it was preempted, and the time of each stage."""
    return await _ask(request, "explain")


async def _ask(request: web.Request, what: Literal["cancel", "explain"]) -> web.Response:
    state, name = request.app[STATE], request.match_info["request_id"]
    state.require_engine()
    tenant = tenant_of(request).name if state.keyring is not None else None
    body = await state.client.ask(what, name, tenant)
    if not body:
        raise _not_found(name)
    return json_answer(request, body)


def _not_found(name: str) -> NotFound:
    return NotFound(
        f"There is no request {name[:128]!r} here, or it ended too long ago; its id is the answer's 'id' or the header"
        " X-Request-Id.",
        param="request_id",
        code="request_not_found",
    )
