"""/v1/stats: present figures and time series of the last minutes, for dashboards without a Prometheus."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from millrace.errors import BadRequest
from millrace.link.engine_stats import EngineStats, TenantFigures
from millrace.link.messages import EngineReady
from millrace.observe.engine_metrics import tokens_by_tier
from millrace.observe.history import (
    MAX_POINTS,
    MAX_WINDOW_S,
    Points,
    engine_series,
    front_series,
    grid,
    latency_series,
    merge_front_series,
    window_latency,
)
from millrace.observe.token_use import token_use
from millrace.params.classes import CLASS_NAMES
from millrace.serve.describe.asked_model import asked_model, figures_of
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.http.siblings import is_for_sibling
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import is_operator, owner_of

_CREDENTIALS = ("Authorization", "X-Api-Key")


class FrontPart(msgspec.Struct):
    """One front's part of the answer, for its siblings."""

    open_requests: int
    open_streams: int
    errors: dict[str, int]
    refused: int
    series: dict[str, Points]
    error_objectives: dict[str, dict[str, tuple[float, float]]] = {}


async def stats(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_query(request, ("window", "step", "end", "front", "model"))
    window_s = _whole(request, "window", 300, MAX_WINDOW_S)
    step_s = _whole(request, "step", 5, window_s)
    if window_s // step_s > MAX_POINTS:
        raise BadRequest(f"window / step is {window_s // step_s} points; ask for at most {MAX_POINTS}.", param="step")
    end = _whole(request, "end", int(time.time()), 1 << 40)
    model = asked_model(request)
    figures = figures_of(request, model)
    ends = grid(end, window_s, step_s)
    samples = figures.history.at(ends)
    own = FrontPart(
        len(state.jobs),
        sum(job.is_streamed for job in state.jobs),
        dict(state.metrics.counts.by_code),
        state.metrics.counts.refused,
        front_series(samples, step_s),
        figures.slos.error_counts(time.time()),
    )
    if is_for_sibling(request):
        return json_answer(request, own)
    parts = [own, *await _other_parts(request, window_s, step_s, end)]
    engine = model.client.stats
    return json_answer(
        request,
        {
            "object": "stats",
            "model": model.name,
            "models": [_listed(one) for one in state.models],
            "time": time.time(),
            "window_s": window_s,
            "step_s": step_s,
            "uptime_s": round(time.time() - state.started, 1),
            "now": _now(request, model, parts),
            "totals": _totals(engine, parts),
            "series": {
                "time": ends[1:],
                **latency_series(figures.history, ends),
                **engine_series(samples, step_s),
                **merge_front_series([part.series for part in parts]),
            },
            "latency": window_latency(figures.history, ends, end + 1),
            "limits": _limits(model.client.ready),
            "price_per_hour": state.config.observe.price_per_hour,
            "tenants": _tenants(request, engine),
            "adapters": _adapters(request, engine),
            "slos": figures.slos.report(time.time(), [part.error_objectives for part in parts[1:]]),
            "view": {"tenant": owner_of(request), "is_operator": is_operator(request)},
        },
    )


def _whole(request: web.Request, name: str, usual: int, most: int) -> int:
    raw = request.query.get(name, str(usual))
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 12 and 1 <= int(raw) <= most):
        raise BadRequest(f"{name} is {raw[:80]!r}; send a whole number from 1 to {most}.", param=name)
    return int(raw)


async def _other_parts(request: web.Request, window_s: int, step_s: int, end: int) -> list[FrontPart]:
    credentials = {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}
    path = f"/v1/stats?window={window_s}&step={step_s}&end={end}"
    answers = await request.app[STATE].siblings.get(path, credentials)
    return [msgspec.json.decode(answer, type=FrontPart) for answer in answers.values()]


def _listed(model: ServedModel[FrontState]) -> dict[str, Any]:
    """Every model of the server in short, so that a dashboard can offer them."""
    engine = model.client.stats
    running, waiting = (engine.running, engine.waiting) if engine is not None else (0, 0)
    return {"name": model.name, "status": model.status, "running": running, "waiting": waiting}


def _now(request: web.Request, model: ServedModel[FrontState], parts: list[FrontPart]) -> dict[str, Any]:
    reason, ready, engine = request.app[STATE].not_ready_because(), model.client.ready, model.client.stats
    now: dict[str, Any] = {
        "ready": reason is None,
        "reason": reason,
        "status": model.status,
        "fronts": len(parts),
        "open_requests": sum(part.open_requests for part in parts),
        "open_streams": sum(part.open_streams for part in parts),
        "block_size": ready.block_size if ready is not None else None,
        "event_loop_lag_ms": next((lag for lag in reversed(parts[0].series["event_loop_lag_ms"]) if lag), None),
    }
    if engine is None:
        return now
    used = engine.blocks_total - engine.blocks_free - engine.blocks_cached
    device = {"total": engine.blocks_total, "used": used, "cached": engine.blocks_cached, "free": engine.blocks_free}
    places = {"device": device}
    lower = {
        "host": (engine.host_blocks_total, engine.host_blocks_used),
        "disk": (engine.disk_blocks_total, engine.disk_blocks_used),
    }
    for place, (total, taken) in lower.items():
        if total:
            places[place] = {"total": total, "used": taken, "free": total - taken}
    return now | {
        "running": engine.running,
        "waiting": engine.waiting,
        "running_by_class": dict(zip(CLASS_NAMES, engine.running_by_class, strict=True)),
        "waiting_by_class": dict(zip(CLASS_NAMES, engine.waiting_by_class, strict=True)),
        "kv_blocks": places,
        "rows_free": engine.rows_free,
    }


def _totals(engine: EngineStats | None, parts: list[FrontPart]) -> dict[str, Any]:
    errors: dict[str, int] = {}
    for part in parts:
        for code, count in part.errors.items():
            errors[code] = errors.get(code, 0) + count
    totals: dict[str, Any] = {"errors": errors, "refused": sum(part.refused for part in parts)}
    if engine is None:
        return totals
    use = token_use(engine)
    return totals | {
        "requests": sum(engine.finished.values()),
        "finished": engine.finished,
        "input_tokens": engine.prompt_tokens,
        "cached_tokens": engine.prefix_hit_tokens,
        "found_in": _found_in(engine),
        "output_tokens": engine.output_tokens,
        "drafted_tokens": engine.drafted_tokens,
        "accepted_tokens": engine.accepted_tokens,
        "computed_tokens": use.computed,
        "useful_tokens": use.useful,
        "wasted_tokens": use.wasted,
        "steps": engine.step_no,
        "preemptions": {"memory": engine.preemptions - engine.yields, "priority": engine.yields},
        "evictions": engine.evictions,
        "evictions_by_reason": {
            "new_tokens": engine.evictions - engine.evicted_for_arrivals,
            "arrival": engine.evicted_for_arrivals,
        },
        "evictions_below": engine.evictions_below,
    }


def _found_in(engine: EngineStats) -> dict[str, int]:
    """Prompt tokens of requests that ended, by where their KV blocks were found."""
    found: dict[str, int] = {}
    for one in engine.tenants:
        for tier, tokens in tokens_by_tier(one).items():
            found[tier] = found.get(tier, 0) + tokens
    return found


def _limits(ready: EngineReady | None) -> dict[str, float]:
    return {
        "bytes_per_s": ready.device_bytes_per_s if ready is not None else 0.0,
        "flops": ready.device_flops if ready is not None else 0.0,
    }


def _tenants(request: web.Request, engine: EngineStats | None) -> list[dict[str, Any]]:
    """On a server with keys, a tenant sees only its own figures; an operator sees all."""
    own = None if is_operator(request) else owner_of(request)
    known = engine.tenants if engine is not None else ()
    return [{"tenant": one.name, **_counts(one)} for one in known if own is None or one.name == own]


def _adapters(request: web.Request, engine: EngineStats | None) -> list[dict[str, Any]]:
    """For operators: several tenants may use an adapter."""
    if engine is None or engine.adapters is None or not is_operator(request):
        return []
    return [{"adapter": one.name, **_counts(one)} for one in engine.adapters.each]


def _counts(one: TenantFigures) -> dict[str, Any]:
    return {
        "running": one.running,
        "waiting": one.waiting,
        "requests": one.requests,
        "input_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "output_tokens": one.output_tokens,
        "found_in": tokens_by_tier(one),
    }
