"""The aiohttp application: routes, middlewares, and the guard that turns every failure into an error body."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from millrace.errors import BadRequest, MillraceError, RequestFailed
from millrace.serve import api_routes
from millrace.serve.describe import routes_absent, routes_info
from millrace.serve.describe.sampler import run_sampler
from millrace.serve.describe.tracing import run_exporter, traced
from millrace.serve.http.app_keys import ADAPTER, FINISH_REASON, REQUEST_ID, STREAM_STATUS
from millrace.serve.http.body import check_headers
from millrace.serve.http.error_bodies import AllowedMethods, error_response, from_aiohttp
from millrace.serve.http.ids import request_id_of
from millrace.serve.http.path_hints import path_hint
from millrace.serve.ollama.create import BLOBS_PATH, check_blob
from millrace.serve.responses.background import open_tasks
from millrace.serve.state import STATE, FrontState
from millrace.serve.stored.background import BACKGROUND, BackgroundRunner, run_background
from millrace.serve.stored.routes_files import UPLOAD_PATH, check_upload
from millrace.serve.tenancy.access import authorise, cross_origin, is_preflight, refuse_cross_site
from millrace.serve.tenancy.auditing import audit
from millrace.serve.tenancy.owner import owned_by_gateway
from millrace.serve.tenancy.trust import is_gateway
from millrace.serve.transfer.prefixes import IMPORT_PATHS
from millrace.web.pages import add_pages

log = logging.getLogger("millrace.serve")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(state: FrontState) -> web.Application:
    server = state.config.server
    app = web.Application(
        middlewares=[
            cross_origin(state.cors_origins),
            traced(state.spans),
            guard,
            refuse_cross_site(state.cors_origins),
            audit(lambda: state.audit),
            authorise(lambda: state.keyring),
            owned_by_gateway(lambda request: is_gateway(request, server.host, server.gateway_key, has_keys=False)),
        ]
    )
    app[STATE] = state
    app[BACKGROUND] = BackgroundRunner(state, api_routes.BATCH_ENDPOINTS, open_tasks)
    app.cleanup_ctx.append(run_background)
    app.cleanup_ctx.append(run_sampler)
    app.cleanup_ctx.append(run_exporter)
    app.on_cleanup.append(_close_fetcher)
    post, get = _post(app), app.router.add_get
    for path, handler in api_routes.POST.items():
        post(path, handler)
    for path, handler in api_routes.GET.items():
        get(path, handler)
    for path, handler in api_routes.HEAD.items():
        app.router.add_head(path, handler)
    for path, handler in api_routes.DELETE.items():
        app.router.add_delete(path, handler)
    get("/health", routes_info.health)
    get("/ready", routes_info.ready)
    get("/metrics", routes_info.metrics)
    get("/openapi.json", routes_info.openapi)
    add_pages(app)
    routes_absent.add_absent_routes(app)
    return app


async def _close_fetcher(app: web.Application) -> None:
    await app[STATE].fetcher.close()


def _post(app: web.Application) -> Callable[[str, Handler], object]:
    def add(path: str, handler: Handler) -> object:
        return app.router.add_post(path, handler, expect_handler=_expect)

    return add


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: set the request id, turn every failure into an error body, count the outcome."""
    request_id = request[REQUEST_ID] = request_id_of(request)
    metrics = request.app[STATE].metrics
    status = 499
    try:
        response = await handler(request)
        status = response.status
        return response
    except (MillraceError, web.HTTPException) as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            status = error.status
            raise
        shown = error if isinstance(error, MillraceError) else _http_error(error, request)
        status = shown.status
        metrics.count_error(shown.code or shown.type, status)
        return error_response(shown, request_id, _error_writer(request))
    except ConnectionError:
        return web.Response(status=499)  # The client has disconnected.
    except Exception as error:
        status = 500
        metrics.count_error("server_error", status)
        log.error("Request %s failed.", request_id, exc_info=error)
        return error_response(
            RequestFailed(f"The server failed on this request; see the server's log for {request_id}."),
            request_id,
            _error_writer(request),
        )
    finally:
        metrics.count_request(_route_of(request), status, request.get(FINISH_REASON, ""))
        if request.method == "POST":
            worst = max(status, request.get(STREAM_STATUS, 0))
            has_failed = worst >= 500 and worst != 501  # 501: this server cannot do what was asked.
            metrics.count_asked(request.get(ADAPTER), has_failed=has_failed)


def _http_error(error: web.HTTPException, request: web.Request) -> MillraceError:
    if isinstance(error, web.HTTPMethodNotAllowed) and is_preflight(request):
        origin = request.headers.get("Origin", "")[:200]
        return AllowedMethods(
            f"This server does not allow cross-origin requests from {origin!r}; start it with --cors-origins {origin}.",
            sorted(error.allowed_methods),
        )
    paths = [resource.canonical for resource in request.app.router.resources()]
    return from_aiohttp(error, request, path_hint(request.path, paths, routes_absent.ABSENT))


def _error_writer(request: web.Request) -> Callable[[MillraceError], bytes]:
    """The error shape of the dialect that the path belongs to, or that its client speaks."""
    for prefix, write in api_routes.ERROR_BODIES.items():
        if request.path.startswith(prefix):
            return write
    return api_routes.error_body_for(request)


def _route_of(request: web.Request) -> str:
    """The route's pattern. All unmatched paths share one label, so that scanners cannot create metrics."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: refuse a body by its headers before the client sends it."""
    request_id = request_id_of(request)
    try:
        if request.headers.get("Expect", "").lower() != "100-continue":
            raise BadRequest("The header 'Expect' must be '100-continue'; remove it.", code="http_error")
        if request.path == UPLOAD_PATH:
            check_upload(request, request.app[STATE])
        elif request.path.startswith(BLOBS_PATH):
            check_blob(request, request.app[STATE])
        elif request.path not in IMPORT_PATHS:  # Signed files, which are checked part by part.
            check_headers(request, request.app[STATE].body_limit_bytes)
    except MillraceError as error:
        response = error_response(error, request_id, _error_writer(request))
        response.force_close()
        return response
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None
