"""Changes that all Millrace replicas must have: adapters, and models that clients made of served ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
from aiohttp import web
from yarl import URL

from millrace.errors import EngineUnavailable, Forbidden, NotImplementedYet, RequestFailed
from millrace.gateway.kept.finding import replica_headers
from millrace.gateway.replica import Replica
from millrace.gateway.state import STATE, GatewayState
from millrace.gateway.upstream import LOST
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.body import read_any_body
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.http.json_answer import json_answer
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.owner import is_operator
from millrace.serve.tenancy.trust import is_from_here

_MODEL_FIELDS = ("from", "source", "base_model_name")
"""Where bodies name the served model that a change is about."""
_ADDING = "/v1/adapters"


@dataclass(frozen=True)
class Done:
    """What one replica answered."""

    replica: Replica
    status: int
    body: bytes = b""
    content_type: str = ""

    @property
    def is_well(self) -> bool:
        return self.status < 300

    @property
    def why(self) -> str:
        try:
            error = msgspec.json.decode(self.body).get("error")
        except (msgspec.DecodeError, AttributeError):
            error = None
        message = error.get("message") if isinstance(error, dict) else error
        return message if isinstance(message, str) else f"it answered {self.status}"


async def at_all(request: web.Request) -> web.Response:
    """Send the request to every Millrace replica that it concerns. It succeeds if it does at all of them; something is
    removed if it is at any of them."""
    shown = (await _done_at_all(request, request.raw_path, {}))[0]
    headers = {REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace", "Content-Type": shown.content_type}
    return web.Response(status=shown.status, body=shown.body, headers=headers)


async def _done_at_all(request: web.Request, path: str, more: dict[str, str]) -> list[Done]:
    """What the replicas answered: those that failed, if any did, and nothing was done elsewhere."""
    state = request.app[STATE]
    _check_may_manage(request, state)
    raw = await read_any_body(request, state.settings.body_limit_mb << 20)
    async with state.watch.adapters.changing:
        replicas = _concerned(state, request, raw)
        done = await asyncio.gather(*(_ask(state, request, one, raw, path, more) for one in replicas))
    well = [one for one in done if one.is_well]
    is_removal = request.method == "DELETE" or request.path == "/v1/unload_lora_adapter"
    failed = [one for one in done if not one.is_well and not (is_removal and well and one.status == 404)]
    if well:
        await asyncio.gather(*(state.watch.probe(one.replica, with_models=True) for one in well))
    if failed and well and request.method != "HEAD":
        names = ", ".join(one.replica.name for one in well)
        error = RequestFailed(f"{names} did this, but {failed[0].replica.name} did not: {failed[0].why}")
        error.status = failed[0].status
        raise error
    return failed or well


async def refuse_pull(request: web.Request) -> web.Response:
    raise NotImplementedYet(
        "A gateway downloads no models: send /api/pull to each replica, or run `millrace pull` there."
    )


async def forget_tenant(request: web.Request) -> web.Response:
    """A gateway with keys knows the tenant by its name, the replicas by what the gateway calls it and by its salt."""
    state, name = request.app[STATE], request.match_info["tenant"]
    if state.keyring is None:
        return await at_all(request)
    tenant = msgspec.structs.replace(state.keyring.named(name), operator=False)
    salt = state.salt_of(tenant)
    path = f"/v1/tenants/{quote(state.owner_of(tenant), safe='')}/cache"
    answers = await _done_at_all(request, path, {SALT_HEADER: salt})
    if not answers[0].is_well:
        raise _failure(answers[0])
    found = [msgspec.json.decode(one.body) for one in answers]
    sums = {field: sum(one[field] for one in found) for field in ("requests", "sessions", "handles")}
    blocks: Counter[str] = Counter()
    for one in found:
        blocks.update(one["blocks"])
    shown = {"tenant": name, "object": "tenant.forgotten", **sums, "blocks": blocks, "shares_prefixes": not salt}
    return json_answer(request, shown)


def _failure(done: Done) -> RequestFailed:
    error = RequestFailed(f"{done.replica.name}: {done.why}")
    error.status = done.status
    return error


def _check_may_manage(request: web.Request, state: GatewayState) -> None:
    """Replicas without keys take the gateway for a program of their machine, so it must be sure of its client."""
    if state.keyring is None and not is_from_here(request, state.settings.host):
        raise Forbidden(
            "Without API keys of its own (--keys-file) a gateway lets only programs on its machine change adapters and"
            " models, at a loopback address."
        )
    if not is_operator(request):
        raise Forbidden("Only an operator's key may change adapters and models (`millrace keys add --operator`).")


def _concerned(state: GatewayState, request: web.Request, raw: bytes) -> list[Replica]:
    """Those that serve the model that the body names, if it names one. None of them may be away: it would miss the
    change."""
    replicas = [one for one in state.fleet.replicas.values() if one.is_millrace and not one.is_draining]
    model = _named_model(request.path, raw)
    replicas = [one for one in replicas if model and one.models.find(model) is not None] or replicas
    away = [one.name for one in replicas if not one.health.share(state.fleet.clock())]
    if away or not replicas:
        why = f"{', '.join(away)} cannot be reached" if away else "it has no Millrace replica"
        raise EngineUnavailable(f"Adapters and models are changed at all replicas of this gateway at once, but {why}.")
    return replicas


def _named_model(path: str, raw: bytes) -> str:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return ""  # The replicas say what is wrong with it.
    fields = ("model",) if path == _ADDING else _MODEL_FIELDS
    found = (body.get(name) for name in fields) if isinstance(body, dict) else ()
    return next((name for name in found if isinstance(name, str)), "")


async def _ask(
    state: GatewayState, request: web.Request, replica: Replica, raw: bytes, path: str, more: dict[str, str]
) -> Done:
    headers = replica_headers(state, request) | {REQUEST_ID_HEADER: request[REQUEST_ID]} | more
    if "Content-Type" in request.headers:
        headers["Content-Type"] = request.headers["Content-Type"]
    url = URL(replica.settings.url + path, encoded=True)
    try:
        async with (
            asyncio.timeout(state.settings.answer_s),
            state.session.request(request.method, url, data=raw or None, headers=headers) as answer,
        ):
            return Done(replica, answer.status, await answer.read(), answer.headers.get("Content-Type", "text/plain"))
    except LOST as error:
        body = msgspec.json.encode({"error": {"message": f"It was lost: {str(error) or type(error).__name__}"}})
        return Done(replica, 502, body, "application/json")


ROUTES = (
    *(("POST", path, at_all) for path in ("/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
    *(("POST", path, at_all) for path in ("/api/create", "/api/copy", "/api/blobs/{digest}")),
    *(("DELETE", path, at_all) for path in ("/v1/adapters/{name:.+}", "/api/delete")),
    ("HEAD", "/api/blobs/{digest}", at_all),
    ("POST", "/api/pull", refuse_pull),
    ("DELETE", "/v1/tenants/{tenant}/cache", forget_tenant),
)
