"""Access to the server: API keys, checked before a request's body is read, and cross-origin requests (CORS)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from millrace.errors import Forbidden
from millrace.serve.http.app_keys import EXTRA_HEADERS
from millrace.serve.http.ids import REQUEST_ID_HEADER, WARNING_HEADER
from millrace.serve.tenancy.block_ticket import BLOCKS_PATH, TICKET_HEADER
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Keyring
from millrace.serve.tenancy.owner import TENANT
from millrace.web.pages import is_open as is_page

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
"""Paths that need no key, besides the pages. None of them shows requests or their text; only an operator's key shows
tenants in `/metrics`."""
CHANGING = frozenset({hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_PATCH, hdrs.METH_DELETE})
PREFLIGHT_AGE_S = 600
EXPOSED = f"{REQUEST_ID_HEADER}, {WARNING_HEADER}, Retry-After"


def authorise(get_keyring: Callable[[], Keyring | None]) -> Middleware:
    """Middleware that sets the tenant from the request's API key. Without a keyring no key is required."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        keyring = get_keyring()
        is_open = request.path in OPEN_PATHS or is_page(request.path) or request.method == hdrs.METH_OPTIONS
        is_open = is_open or (request.path == BLOCKS_PATH and TICKET_HEADER in request.headers)
        if keyring is not None:
            key = key_in(request)
            is_visitor = is_open and (key is None or request.path != "/metrics")
            request[TENANT] = DEFAULT_TENANT if is_visitor else keyring.tenant_of(key)
        return await handler(request)

    return check_key


def key_in(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key")


def cross_origin(origins: Collection[str]) -> Middleware:
    """Middleware for CORS: lets browsers call the API from pages of the allowed origins ("*": all)."""

    @web.middleware
    async def allow_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
        allowed = _allowed_origin(request, origins)
        if allowed is None:
            return await handler(request)
        headers = {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": EXPOSED}
        if allowed != "*":
            headers["Vary"] = "Origin"
        if is_preflight(request):
            return _preflight_answer(request, headers)
        request[EXTRA_HEADERS] = headers
        response = await handler(request)
        if not response.prepared:
            response.headers.update(headers)
        return response

    return allow_origin


def refuse_cross_site(origins: Collection[str]) -> Middleware:
    """Middleware that refuses requests which a page of another origin makes the browser send, unless CORS allows it.

    Without this, any page that the user visits could make a server on localhost generate or cancel. Clients that are
    not browsers send neither `Sec-Fetch-Site` nor `Origin`.
    """

    @web.middleware
    async def check_site(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in CHANGING and _is_cross_site(request) and _allowed_origin(request, origins) is None:
            origin = request.headers.get(hdrs.ORIGIN, "another site")[:200]
            raise Forbidden(
                f"This request comes from a page of {origin!r}, which may not use this server; start it with"
                " --cors-origins and that page's origin to allow it.",
                code="cross_site",
            )
        return await handler(request)

    return check_site


def _is_cross_site(request: web.Request) -> bool:
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site.lower() not in ("same-origin", "none")
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return False
    # Browsers omit Sec-Fetch-Site on plain HTTP. Setting X-Forwarded-Host takes a page of another origin a preflight.
    own = {request.headers.get(hdrs.HOST), request.headers.get(hdrs.X_FORWARDED_HOST)}
    return origin.partition("://")[2] not in own


def is_preflight(request: web.Request) -> bool:
    """True for a CORS preflight: a browser asks whether a page of another origin may call the API."""
    return request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers


def _preflight_answer(request: web.Request, headers: dict[str, str]) -> web.Response:
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "authorization, content-type")
    headers |= {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": _header_names(asked),
        "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
    }
    return web.Response(status=204, headers=headers)


def _allowed_origin(request: web.Request, origins: Collection[str]) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or not origins:
        return None
    return "*" if "*" in origins else origin if origin in origins else None


def _header_names(asked: str) -> str:
    """The header names that the browser asked for, without anything that is not a header name."""
    names = [name.strip() for name in asked[:2048].split(",")]
    return ", ".join(name for name in names if name and all(c.isalnum() or c in "-_" for c in name))
