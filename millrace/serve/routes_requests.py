"""The routes about one request: cancel it, or have it explained. Its id is X-Request-Id or the answer's own `id`."""

from __future__ import annotations

from aiohttp import web

from millrace.errors import NotFound
from millrace.serve.gate import tenant_of
from millrace.serve.keys import STATE
from millrace.serve.routes_info import json_answer


async def cancel(request: web.Request) -> web.Response:
    """Its stream or answer ends with the error `request_cancelled`; one that has ended already is left as it is."""
    return await _ask(request, "cancel")


async def explain(request: web.Request) -> web.Response:
    """Why it waited, what it found in the cache, whether it was preempted, and the time of each stage."""
    return await _ask(request, "explain")


async def _ask(request: web.Request, what: str) -> web.Response:
    state, name = request.app[STATE], request.match_info["id"]
    state.require_engine()
    tenant = tenant_of(request).name if state.keyring is not None else None
    body = await state.client.ask("cancel" if what == "cancel" else "explain", name, tenant)
    if not body:
        raise NotFound(
            f"There is no request {name[:128]!r} here, or it ended too long ago; its id is the answer's 'id' or the"
            " header X-Request-Id.",
            code="request_not_found",
        )
    return json_answer(request, body)
