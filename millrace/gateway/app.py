"""A gateway as a running server: its application, its middlewares, and the drain at its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from aiohttp import web

from millrace.config import Config, replace
from millrace.errors import ConfigError, Conflict, MillraceError, RequestFailed
from millrace.gateway import routes_api, routes_fleet, routes_rollout
from millrace.gateway.fleet import Fleet
from millrace.gateway.kept import lists, managing
from millrace.gateway.membership import FILE, expire_leases, follow_dns, follow_file, host_and_port
from millrace.gateway.replica_http.client import tls_trusting
from millrace.gateway.settings import GatewaySettings, ReplicaSettings, read_fleet
from millrace.gateway.state import STATE, GatewayState
from millrace.gateway.upstream import new_session
from millrace.model_router.router import AUTO
from millrace.serve.api_routes import ERROR_BODIES, error_body_for
from millrace.serve.app import BACKLOG, CLOSE_GRACE_S, KEEP_ALIVE_S, allow_many_connections, listening_socket
from millrace.serve.describe.tracing import traced
from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.connection import FrontRunner
from millrace.serve.http.error_bodies import error_response, from_aiohttp
from millrace.serve.http.ids import request_id_of
from millrace.serve.http.path_hints import path_hint
from millrace.serve.tenancy.access import authorise, refuse_cross_site
from millrace.web.pages import GATEWAY_PAGES, add_pages

log = logging.getLogger("millrace.gateway")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_POLL_S = 0.05


def build_app(state: GatewayState, fleet_file: Path | None = None) -> web.Application:
    app = web.Application(
        middlewares=[traced(state.spans), guard, refuse_cross_site(()), authorise(lambda: state.keyring)]
    )
    app[STATE] = state

    async def watched(app: web.Application) -> AsyncIterator[None]:
        state.watch.start()
        state.limits.start()
        followers = [asyncio.create_task(expire_leases(state))]
        if fleet_file is not None:
            followers.append(asyncio.create_task(follow_file(state, fleet_file)))
        if state.spans is not None:
            followers.append(asyncio.create_task(state.spans.run()))
        if state.settings.discover:
            followers.append(asyncio.create_task(follow_dns(state, state.settings.discover)))
        yield
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)  # The last spans are sent.
        state.learner.close()
        if state.shadow is not None:
            state.shadow.close()
        await state.watch.close()
        await state.limits.close()
        await state.session.close()
        state.client.close()
        state.fleet.decisions.close()

    app.cleanup_ctx.append(watched)
    get, post = app.router.add_get, app.router.add_post
    get("/health", routes_fleet.health)
    get("/ready", routes_fleet.ready)
    get("/metrics", routes_fleet.metrics)
    get("/v1/models", routes_fleet.list_models)
    get(f"/v1/models/{AUTO}", routes_fleet.show_auto)
    for path in ("/v1/files", "/v1/batches", "/v1/requests", "/v1/sessions", "/v1/cache", "/v1/chat/completions"):
        get(path, lists.merged_list)
    for path in ("/api/tags", "/api/ps"):
        get(path, lists.ollama_models)
    get("/v1/requests/{request_id}/explain", routes_fleet.explain)
    get("/v1/fleet", routes_fleet.fleet)
    post("/v1/fleet/replicas", _of_one_process(routes_fleet.add_replica))
    app.router.add_delete("/v1/fleet/replicas/{name}", _of_one_process(routes_fleet.remove_replica))
    post("/v1/fleet/replicas/{name}/drain", _of_one_process(routes_fleet.drain_replica))
    post("/v1/fleet/replicas/{name}/return", _of_one_process(routes_fleet.return_replica))
    for path, begin, show, end in (
        ("/v1/fleet/rollout", routes_rollout.begin_rollout, routes_rollout.show_rollout, routes_rollout.end_rollout),
        ("/v1/fleet/shadow", routes_rollout.begin_shadow, routes_rollout.show_shadow, routes_rollout.end_shadow),
    ):
        post(path, _of_one_process(begin))
        get(path, show)
        app.router.add_delete(path, _of_one_process(end))
    for method, path, handler in managing.ROUTES:
        app.router.add_route(method, path, handler)
    add_pages(app, GATEWAY_PAGES)
    app.router.add_route("*", "/{path:.*}", routes_api.pass_on)
    return app


def _of_one_process(handler: Handler) -> Handler:
    """A change of the fleet, which the gateway's other processes would not hear of."""

    async def changed(request: web.Request) -> web.StreamResponse:
        if (workers := request.app[STATE].settings.workers) > 1:
            raise Conflict(
                f"This gateway has {workers} processes, and a change made here would reach one of them. Change the file"
                " of --config, which all of them read, or run one process."
            )
        return await handler(request)

    return changed


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Set the request id, turn every failure into an error body, count the outcome."""
    request_id = request[REQUEST_ID] = request_id_of(request)
    status = 499
    try:
        response = await handler(request)
        status = response.status
        return response
    except (MillraceError, web.HTTPException) as error:
        status = error.status
        if isinstance(error, web.HTTPException):
            if status < 400:
                raise
            error = from_aiohttp(error, request, path_hint(request.path, ()))
        return error_response(error, request_id, _error_writer(request))
    except ConnectionError:
        return web.Response(status=499)  # The client has disconnected.
    except Exception as error:
        status = 500
        log.error("Request %s failed.", request_id, exc_info=error)
        failure = RequestFailed(f"The gateway failed on this request; see its log for {request_id}.")
        return error_response(failure, request_id, _error_writer(request))
    finally:
        metrics = request.app[STATE].metrics
        resource = request.match_info.route.resource
        metrics.requests.labels(resource.canonical if resource is not None else "unmatched", status).inc()


def _error_writer(request: web.Request) -> Callable[[MillraceError], bytes]:
    for prefix, write in ERROR_BODIES.items():
        if request.path.startswith(prefix):
            return write
    return error_body_for(request)


async def serve_gateway(
    settings: GatewaySettings,
    replicas: Sequence[ReplicaSettings],
    *,
    fleet_file: Path | None = None,
    on_listening: Callable[[str, int], None] | None = None,
    on_state: Callable[[GatewayState], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain."""
    allow_many_connections()
    tls = tls_trusting(settings.replica_ca)
    fleet = Fleet(settings)
    listed = read_fleet(fleet_file)[1] if fleet_file is not None else ()
    for one in replicas:
        fleet.add(one, FILE if one in listed else "")
    if settings.discover:
        host_and_port(settings.discover)
    elif not replicas and fleet_file is None:
        raise ConfigError(
            "A gateway needs --replicas URL,…, --config fleet.toml or --discover HOST:PORT.", param="replicas"
        )
    config = replace(Config(), server__stream_buffer_kb=settings.stream_buffer_kb)
    sock = listening_socket(settings.host, settings.port, config, reuse_port=settings.reuse_port)
    state = GatewayState(settings, fleet, new_session(fleet, tls), tls)
    runner = FrontRunner(
        build_app(state, fleet_file),
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=CLOSE_GRACE_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        host, port = sock.getsockname()[:2]
        if on_state is not None:
            on_state(state)
        if on_listening is not None:
            on_listening(host, port)
        await _until_stopped(state, stop or asyncio.Event())
    finally:
        await runner.cleanup()


async def _until_stopped(state: GatewayState, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in signals:
            loop.add_signal_handler(number, stop.set)
    except (RuntimeError, ValueError):
        pass  # Not the main thread: the owner of the process sets `stop`.
    await stop.wait()
    state.is_draining = True
    end = loop.time() + state.settings.drain_s
    while state.num_open and loop.time() < end:
        await asyncio.sleep(_POLL_S)
