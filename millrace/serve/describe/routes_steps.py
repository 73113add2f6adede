"""/v1/steps: the engine's last steps; /v1/cost: what tokens cost on this machine."""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, Forbidden
from millrace.observe.cost.report import cost_report
from millrace.serve.describe.asked_model import asked_model, figures_of, loaded_engine
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.state import STATE
from millrace.serve.tenancy.owner import is_operator, owner_of

MAX_STEPS = 4096


async def steps(request: web.Request) -> web.Response:
    """Times are on the machine's monotonic clock; `now` is what it shows, `time` the same moment in Unix time."""
    if not is_operator(request):  # A step shows how long the prompts of other tenants are.
        raise Forbidden("The engine's steps show the work of all tenants; use an operator's key.")
    check_query(request, ("last", "model"))
    raw = request.query.get("last", "200")
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 6 and 1 <= int(raw) <= MAX_STEPS):
        raise BadRequest(f"last is {raw[:80]!r}; send a whole number from 1 to {MAX_STEPS}.", param="last")
    model = asked_model(request)
    limits = loaded_engine(request, model)
    found = msgspec.json.decode(await model.client.query("steps", raw, None))
    found |= {"now": time.monotonic(), "time": time.time(), "model": limits.model_name, "device": limits.device}
    found |= {"device_bytes_per_s": limits.device_bytes_per_s, "device_flops": limits.device_flops}
    return json_answer(request, found)


async def cost(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_query(request, ("price", "model"))
    raw = request.query.get("price")
    try:
        price = float(raw) if raw is not None else state.config.observe.price_per_hour
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e6:
        raise BadRequest(f"price is {str(raw)[:80]!r}; send dollars per hour.", param="price")
    own = None if is_operator(request) else owner_of(request)
    if own is not None and raw is not None:
        raise Forbidden("On a server with keys, the price is the operator's: --price-per-hour.", param="price")
    model = asked_model(request)
    others = [figures.history.all() for name, figures in state.metrics.models.items() if name != model.name]
    samples = figures_of(request, model).history.all()
    report = await asyncio.to_thread(cost_report, samples, model.client.ready, price, own, beside=others)
    return json_answer(request, {"model": model.name, **report})
