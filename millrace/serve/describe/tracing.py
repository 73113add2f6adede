"""Middleware that follows the caller's trace context and exports the spans of each request; the spans of steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from millrace.errors import EngineUnavailable
from millrace.observe.tracing.context import TRACEPARENT, TRACESTATE, enter_context
from millrace.observe.tracing.exporter import SpanExporter
from millrace.observe.tracing.otlp import Span
from millrace.observe.tracing.request_trace import RequestTrace
from millrace.observe.tracing.step_spans import step_spans
from millrace.serve.http.app_keys import EXTRA_HEADERS, FINISH_REASON, MODEL, REQUEST_ID, TOKEN_COUNTS, TRACE
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.access import OPEN_PATHS

STEPS_EVERY_S = 1.0
MAX_STEPS = 2000
"""Steps that are asked for at once; earlier ones count as dropped spans."""
OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/v1/embed", "/v2/embed", "/v1/multi-vector", "/v1/sparse-vector"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
    **dict.fromkeys(("/v1/classify", "/classify"), "classify"),
}
"""OpenTelemetry's names of what an endpoint does."""
PROVIDER = "millrace"
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
    if (operation := OPERATIONS.get(route)) is not None and request.method == "POST":
        attributes["gen_ai.operation.name"], attributes["gen_ai.provider.name"] = operation, PROVIDER
    if (counts := request.get(TOKEN_COUNTS)) is not None:
        attributes["gen_ai.request.model"] = request.get(MODEL, "")
        attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"] = counts[0], counts[1]
        attributes["gen_ai.response.finish_reasons"] = (request.get(FINISH_REASON, ""),)
    return trace.spans(f"{request.method} {route}", status)


async def run_exporter(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    exporter, tasks = state.spans, []
    if exporter is not None:
        tasks = [asyncio.create_task(exporter.run())]
        if state.config.observe.otlp_steps and state.client.front_index == 0:
            tasks.append(asyncio.create_task(_export_steps(state, exporter)))
    yield
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _export_steps(state: FrontState, exporter: SpanExporter) -> None:
    """Ask each engine that has run steps for them, every `STEPS_EVERY_S`. An idle engine is not asked."""
    exported: dict[str, int] = {}
    while True:
        await asyncio.sleep(STEPS_EVERY_S)
        for model in state.models:
            stats, client = model.client.stats, model.client
            before = exported.get(model.name, 0)
            if client.ready is None or stats is None or stats.step_no == before:
                continue
            before = before if stats.step_no > before else 0  # Another engine counts from zero.
            exported[model.name] = stats.step_no
            with contextlib.suppress(EngineUnavailable):
                wanted = min(MAX_STEPS, stats.step_no - before)
                body = await client.query("steps", str(wanted), None)
                exporter.num_dropped += stats.step_no - before - wanted
                steps = msgspec.json.decode(body)
                exporter.add(step_spans(steps, before, model.name, time.time() - time.monotonic()))
                exported[model.name] = max([stats.step_no, *steps.get("step_no", [])])
