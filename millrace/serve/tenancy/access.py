"""Who may come in: API keys before anything of a request is read, and the browser's questions about other origins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from millrace.serve.http.app_keys import EXTRA_HEADERS, STATE, TENANT
from millrace.serve.http.ids import REQUEST_ID_HEADER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/docs", "/openapi.json"})
"""What probes, scrapers and people may read without a key. None of it tells of requests or their text."""
PREFLIGHT_AGE_S = 600
EXPOSED = f"{REQUEST_ID_HEADER}, Retry-After"


@web.middleware
async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    keyring = request.app[STATE].keyring
    if keyring is not None and request.path not in OPEN_PATHS and request.method != hdrs.METH_OPTIONS:
        request[TENANT] = keyring.tenant_of(key_in(request))
    return await handler(request)


def key_in(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key")


@web.middleware
async def cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Browsers ask before a page of another origin may call us; only origins that were allowed get a yes."""
    allowed = _allowed_origin(request)
    if allowed is None:
        return await handler(request)
    headers = {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": EXPOSED}
    if allowed != "*":
        headers["Vary"] = "Origin"
    if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "authorization, content-type")
        headers |= {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": _header_names(asked),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)
    request[EXTRA_HEADERS] = headers
    response = await handler(request)
    if not response.prepared:
        response.headers.update(headers)
    return response


def _allowed_origin(request: web.Request) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    origins = request.app[STATE].cors_origins
    if origin is None or not origins:
        return None
    return "*" if "*" in origins else origin if origin in origins else None


def _header_names(asked: str) -> str:
    """The names that the browser asked for; a header may not carry anything else back."""
    names = [name.strip() for name in asked[:2048].split(",")]
    return ", ".join(name for name in names if name and all(c.isalnum() or c in "-_" for c in name))
