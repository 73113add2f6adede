"""Lists whose entries are on several replicas: files, batches, sessions, running requests."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from millrace.errors import BadRequest
from millrace.gateway.kept.finding import ASK_S, home_of, replica_headers
from millrace.gateway.replica import Replica
from millrace.gateway.routing.homes import stored_as
from millrace.gateway.state import STATE, GatewayState
from millrace.gateway.upstream import LOST
from millrace.serve.http.ids import WARNING_HEADER
from millrace.serve.http.json_answer import json_answer
from millrace.serve.tenancy.owner import tenant_of

Page = dict[str, Any]
_SUMS = frozenset({"total", "used_bytes", "max_bytes"})


async def merged_list(request: web.Request) -> web.Response:
    """The entries of one replica after those of another, by their names. `after` goes on behind its entry, so pages
    together have each entry once. A replica that did not answer is named in a header."""
    state, query = request.app[STATE], dict(request.query)
    replicas = sorted((one for one in state.fleet.open_replicas() if one.is_millrace), key=lambda one: one.name)
    if after := query.get("after"):
        home = await home_of(state, request, stored_as(request.path, after))
        if home not in {one.name for one in replicas}:
            raise BadRequest(f"after is {after[:200]!r}, which is not in this list.", param="after")
        replicas = [one for one in replicas if one.name >= home]
    limit = int(query["limit"]) if query.get("limit", "").isdecimal() else None
    found: list[Page] = []
    missing: list[str] = []
    left = limit
    for replica in replicas:
        if left is not None and left != limit:
            query["limit"] = str(max(1, left))
        page = await _page(state, request, replica, query)
        query.pop("after", None)
        if page is None:
            missing.append(replica.name)
            continue
        if isinstance(page, web.Response):
            return page
        entries = page.get("data", [])
        if left is not None and "has_more" in page:
            page["data"], page["has_more"] = entries[:left], page["has_more"] or len(entries) > left
            left -= len(page["data"])
        found.append(page)
        if page.get("has_more"):
            break
    return json_answer(request, _merged(found), status=200, **_warning(missing))


async def ollama_models(request: web.Request) -> web.Response:
    """Ollama's lists of models that are known or loaded: those of all replicas, each once."""
    state, tenant = request.app[STATE], tenant_of(request)
    replicas = [one for one in state.fleet.open_replicas() if one.settings.kind in ("millrace", "ollama")]
    merged: dict[str, Any] = {}
    for page in await asyncio.gather(*(_page(state, request, one, {}) for one in replicas)):
        if isinstance(page, web.Response):
            return page
        for entry in (page or {}).get("models", []):
            if state.may_use(tenant, str(entry.get("name", ""))):
                merged.setdefault(str(entry["name"]), entry)
    return json_answer(request, {"models": list(merged.values())})


def _merged(found: list[Page]) -> Page:
    first = found[0] if found else {"object": "list"}
    data = [entry for page in found for entry in page.get("data", [])]
    merged = {**first, "data": data}
    for name in _SUMS & first.keys():
        merged[name] = sum(page.get(name, 0) for page in found)
    if "has_more" in first:
        merged["has_more"] = any(page.get("has_more") for page in found)
    for name, at in (("first_id", 0), ("last_id", -1)):
        if any(name in page for page in found):
            merged[name] = data[at].get("id", "") if data else ""
    return merged


def _warning(missing: list[str]) -> dict[str, str]:
    return {WARNING_HEADER: f"{', '.join(missing)} did not answer; what is kept there is missing."} if missing else {}


async def _page(
    state: GatewayState, request: web.Request, replica: Replica, query: dict[str, str]
) -> Page | web.Response | None:
    """None if the replica could not answer; its refusal if the query is wrong."""
    url = replica.settings.url + request.path + (f"?{urlencode(query)}" if query else "")
    try:
        async with (
            asyncio.timeout(ASK_S),
            state.session.get(url, headers=replica_headers(state, request)) as answer,
        ):
            body = await answer.read()
            if answer.status in (401, 403) or (answer.status == 400 and query):
                return web.Response(status=answer.status, body=body, content_type="application/json")
            page = msgspec.json.decode(body)
            return page if answer.status == 200 and isinstance(page, dict) else None
    except (*LOST, msgspec.DecodeError):
        return None
