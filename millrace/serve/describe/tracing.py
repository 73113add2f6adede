"""Middleware that follows the caller's trace context and exports the spans of each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from millrace.observe.tracing.context import TRACEPARENT, TRACESTATE, enter_context
from millrace.observe.tracing.exporter import SpanExporter
from millrace.observe.tracing.otlp import Span
from millrace.observe.tracing.request_trace import RequestTrace
from millrace.serve.http.app_keys import EXTRA_HEADERS, FINISH_REASON, MODEL, REQUEST_ID, TOKEN_COUNTS, TRACE
from millrace.serve.state import STATE
from millrace.serve.tenancy.access import OPEN_PATHS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def traced(exporter: SpanExporter | None) -> Middleware:
    @web.middleware
    async def follow(request: web.Request, handler: Handler) -> web.StreamResponse:
        if exporter is None or request.path in OPEN_PATHS:
            return await handler(request)
        context = enter_context(request.headers.get(TRACEPARENT), request.headers.get(TRACESTATE))
        trace = request[TRACE] = RequestTrace(context)
        request[EXTRA_HEADERS] = {**request.get(EXTRA_HEADERS, {}), TRACEPARENT: context.header}
        status = 499
        try:
            response = await handler(request)
            status = response.status
            if not response.prepared:
                response.headers[TRACEPARENT] = context.header
            return response
        finally:
            if context.is_sampled:
                exporter.add(_spans(request, trace, status))

    return follow


def _spans(request: web.Request, trace: RequestTrace, status: int) -> list[Span]:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unmatched"
    attributes = trace.attributes
    attributes |= {
        "http.request.method": request.method,
        "http.route": route,
        "http.response.status_code": status,
        "millrace.request_id": request.get(REQUEST_ID, ""),
    }
    if (counts := request.get(TOKEN_COUNTS)) is not None:
        attributes["gen_ai.request.model"] = request.get(MODEL, "")
        attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"] = counts[0], counts[1]
        attributes["gen_ai.response.finish_reasons"] = [request.get(FINISH_REASON, "")]
    return trace.spans(f"{request.method} {route}", status)


async def run_exporter(app: web.Application) -> AsyncIterator[None]:
    exporter = app[STATE].spans
    task = asyncio.create_task(exporter.run()) if exporter is not None else None
    yield
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
