"""The gateway's own endpoints: health, metrics, merged lists, explanations, and the replicas themselves."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, Conflict, Forbidden, NotFound
from millrace.gateway import membership
from millrace.gateway.kept.finding import replica_headers
from millrace.gateway.replica import Replica
from millrace.gateway.routes_api import pass_on
from millrace.gateway.routing.decisions import RequestRecord
from millrace.gateway.routing.model_list import Entry
from millrace.gateway.settings import checked, replica_name, without_credentials
from millrace.gateway.state import STATE, GatewayState
from millrace.gateway.upstream import LOST
from millrace.model_router.router import AUTO
from millrace.observe.metrics import CONTENT_TYPE
from millrace.serve.anthropic import models as anthropic
from millrace.serve.http.body import read_body
from millrace.serve.http.error_bodies import RETRY_AFTER_S
from millrace.serve.http.json_answer import json_answer
from millrace.serve.tenancy.owner import is_operator, owner_of, tenant_of

_LIST_TIMEOUT_S = 10.0
_SHOWN_ROUTES = 50
_AUTO_ENTRY = {"id": AUTO, "object": "model", "created": 0, "owned_by": "millrace"}
_MAX_SETTINGS_BYTES = 1 << 16


async def health(request: web.Request) -> web.Response:
    return json_answer(request, {"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Ready while a replica can take requests."""
    state = request.app[STATE]
    open_now = len(state.fleet.open_replicas())
    if open_now and not state.is_draining:
        return json_answer(request, {"status": "ready", "replicas": open_now})
    reason = "the gateway is shutting down" if state.is_draining else "no replica can take requests"
    body = {"status": "not ready", "reason": reason}
    return json_answer(request, body, status=503, **{"Retry-After": str(RETRY_AFTER_S)})


async def metrics(request: web.Request) -> web.Response:
    page = request.app[STATE].metrics.page()
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE, "Server": "millrace"})


async def list_models(request: web.Request) -> web.StreamResponse:
    """The models of all replicas that can be reached, each once. Replicas that show them to clients only are asked with
    the client's key."""
    state, tenant = request.app[STATE], tenant_of(request)
    replicas = state.fleet.open_replicas()
    if replicas and not any(one.models.entries for one in replicas):
        return await pass_on(request)
    merged: dict[str, Entry] = {}
    for replica in replicas:
        for entry in replica.models.entries:
            if state.may_use(tenant, str(entry["id"])):
                merged.setdefault(str(entry["id"]), entry)
    if state.auto is not None and state.may_use(tenant, AUTO):
        merged.setdefault(AUTO, _AUTO_ENTRY)
    if anthropic.is_anthropic(request):
        return anthropic.answer_with(request, [_as_anthropic(one) for one in merged.values()])
    return json_answer(request, {"object": "list", "data": list(merged.values())})


def _as_anthropic(entry: Entry) -> anthropic.AnthropicModel:
    created, max_context = entry.get("created"), entry.get("max_model_len")
    return anthropic.described_as(
        str(entry["id"]),
        created if isinstance(created, int) else 0,
        max_context if isinstance(max_context, int) else None,
    )


async def show_auto(request: web.Request) -> web.StreamResponse:
    """The model that stands for the router's choice."""
    if request.app[STATE].auto is None:
        return await pass_on(request)
    return json_answer(request, _AUTO_ENTRY)


# ── explaining ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def explain(request: web.Request) -> web.Response:
    """Each routing decision of a request with its reason, and what its last replica says of it."""
    state, wanted = request.app[STATE], request.match_info["request_id"]
    record = state.fleet.decisions.find(wanted)
    if record is None or not (is_operator(request) or record.owner == owner_of(request)):
        raise NotFound(
            f"Request {wanted[:128]!r} is not among the last that this gateway routed. A request's id is its header"
            " X-Request-Id.",
            param="request_id",
            code="request_not_found",
        )
    own = _explained(record)
    at_replica = await _explained_there(state, request, record, wanted)
    return json_answer(request, {"id": wanted, "gateway": own, **({"replica": at_replica} if at_replica else {})})


def _explained(record: RequestRecord) -> dict[str, Any]:
    return {
        "decisions": [
            {
                "policy": one.policy,
                "cause": one.cause,
                "replica": one.choice.replica,
                "reason": one.choice.reason,
                **({"kv_from": one.kv_from} if one.kv_from else {}),
                "candidates": [msgspec.to_builtins(candidate) for candidate in one.candidates],
            }
            for one in record.decisions
        ],
        **({"model": msgspec.to_builtins(record.model_choice)} if record.model_choice is not None else {}),
        "notes": record.notes,
        "outcome": msgspec.to_builtins(record.outcome),
    }


async def _explained_there(state: GatewayState, request: web.Request, record: RequestRecord, wanted: str) -> Any:
    name = record.decisions[-1].choice.replica if record.decisions else ""
    replica = state.fleet.replicas.get(name)
    if replica is None or not replica.is_millrace:
        return None
    url = f"{replica.settings.url}/v1/requests/{quote(wanted, safe='')}/explain"
    try:
        async with (
            asyncio.timeout(_LIST_TIMEOUT_S),
            state.session.get(url, headers=replica_headers(state, request)) as answer,
        ):
            return msgspec.json.decode(await answer.read()) if answer.status == 200 else None
    except (*LOST, msgspec.DecodeError):
        return None


# ── the replicas ──────────────────────────────────────────────────────────────────────────────────────────────────────
async def fleet(request: web.Request) -> web.Response:
    """Every replica with its state and load, and the last routes with their reasons."""
    require_operator(request)
    state = request.app[STATE]
    routes = [
        {
            "id": record.decisions[0].asked.id,
            "replica": record.decisions[-1].choice.replica,
            "reason": record.decisions[-1].choice.reason,
            "causes": [one.cause for one in record.decisions],
            "model": record.model_choice.model if record.model_choice is not None else "",
            "why_model": record.model_choice.reason if record.model_choice is not None else "",
            "notes": record.notes[-3:],
            "ended": record.outcome.ended if record.outcome is not None else None,
        }
        for record in state.fleet.decisions.recent(_SHOWN_ROUTES)
        if record.decisions
    ]
    replicas = [describe(state, one) for one in state.fleet.replicas.values()]
    body = {"object": "fleet", "policy": state.settings.policy, "open_requests": state.num_open}
    rollout, shadow = state.fleet.rollout, state.shadow
    more = {
        "limits": {"scope": state.limits.scope, "lost": state.limits.lost_reason},
        "budgets": state.auto.describe() if state.auto is not None else [],
        "rollout": rollout.describe() if rollout is not None else None,
        "shadow": shadow.describe() if shadow is not None else None,
    }
    return json_answer(request, {**body, "replicas": replicas, "routes": routes, **more})


def describe(state: GatewayState, replica: Replica) -> dict[str, Any]:
    share = replica.health.share(state.fleet.clock())
    return {
        "name": replica.name,
        "url": without_credentials(replica.settings.url),
        "group": replica.settings.group,
        "kind": replica.settings.kind,
        "state": "draining" if replica.is_draining or replica.load.draining else replica.health.state,
        "reason": replica.health.reason,
        "share": round(share, 3),
        "models": list(replica.models.ids),
        "open_requests": len(replica.attempts),
        "outstanding_tokens": replica.outstanding_tokens,
        "token_ms": round(replica.token_ms, 2),
        "sent": replica.num_sent,
        "failed": replica.num_failed,
        "ejections": replica.health.num_ejections,
        "recent_ejections": [{"at": at, "reason": reason} for at, reason in replica.recent_ejections],
        "load": msgspec.to_builtins(replica.load),
    }


async def add_replica(request: web.Request) -> web.Response:
    """Register a replica: {"url": …} and the fields of a fleet file's [[replicas]]. With `lease_s` it is removed unless
    it registers again within that time."""
    require_operator(request)
    state = request.app[STATE]
    try:
        tree = msgspec.json.decode(await read_body(request, _MAX_SETTINGS_BYTES))
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    lease_s = tree.pop("lease_s", 0.0) if isinstance(tree, dict) else 0.0
    if not isinstance(lease_s, int | float) or isinstance(lease_s, bool) or lease_s < 0:
        raise BadRequest(f"'lease_s' is {lease_s!r}; it must be seconds, 0 for ever.", param="lease_s")
    settings = checked(tree, "The body")
    replica = state.fleet.replicas.get(replica_name(settings))
    status = 200
    if replica is None or replica.settings != settings:
        replica, status = state.fleet.add(settings), 201
        state.watch.follow(replica)
    replica.lease_until = state.fleet.clock() + lease_s if lease_s else 0.0
    return json_answer(request, describe(state, replica), status=status)


async def remove_replica(request: web.Request) -> web.Response:
    """Forget a replica. Its open streams go on elsewhere."""
    state, replica = _named(request)
    membership.remove_replica(state, replica.name, "it was removed from the fleet")
    return json_answer(request, {"object": "replica.removed", "name": replica.name})


async def drain_replica(request: web.Request) -> web.Response:
    """Send nothing new there. With ?move=1 its open streams go on elsewhere at once."""
    state, replica = _named(request)
    others = [one for one in state.fleet.open_replicas() if one is not replica]
    if not others and request.query.get("force") != "1":
        raise Conflict(f"{replica.name} is the last replica that takes requests; ?force=1 drains it all the same.")
    replica.is_draining = True
    if request.query.get("move") == "1":
        replica.give_up_all("it drains")
    return json_answer(request, describe(state, replica))


async def return_replica(request: web.Request) -> web.Response:
    state, replica = _named(request)
    replica.is_draining = False
    return json_answer(request, describe(state, replica))


def _named(request: web.Request) -> tuple[GatewayState, Replica]:
    require_operator(request)
    state, name = request.app[STATE], request.match_info["name"]
    if name not in state.fleet.replicas:
        raise NotFound(f"There is no replica {name[:128]!r}; GET /v1/fleet lists them.", param="name")
    return state, state.fleet.replicas[name]


def require_operator(request: web.Request) -> None:
    if not is_operator(request):
        raise Forbidden("Only an operator's key may see and change the fleet.")
