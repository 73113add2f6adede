"""/v1/load: how busy this replica is, for gateways that choose between replicas. Asks no other process."""

from __future__ import annotations

import msgspec
from aiohttp import web

from millrace.serve.describe.asked_model import asked_model
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.version import __version__


class ModelLoad(msgspec.Struct, frozen=True):
    """The load of one model's engine, as it last reported it: at most a quarter of a second ago while steps run."""

    model: str
    status: str
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Tokens that waiting and running requests must compute before their first output token."""
    kv_used: float = 0.0
    """Share of the KV blocks that running requests hold; cached blocks that can be evicted do not count."""
    step_ms: float = 0.0
    """Average time of the last steps."""
    tokens_per_s: float = 0.0
    """Throughput of full steps, prompt and output tokens together; 0 until measured."""
    rows_free: int = 0
    block_tokens: int = 0
    """Tokens per KV block; 0 while the model is not loaded."""


class Load(ModelLoad, frozen=True, kw_only=True):
    """The load of the model that was asked for, by default the first, and of every model of the server."""

    draining: bool
    version: str
    models: list[ModelLoad]


async def load(request: web.Request) -> web.Response:
    check_query(request, ("model",))
    state = request.app[STATE]
    shown = model_load(asked_model(request))
    models = [model_load(model) for model in state.models]
    answer = Load(**msgspec.structs.asdict(shown), draining=state.draining, version=__version__, models=models)
    return json_answer(request, answer)


def model_load(model: ServedModel[FrontState]) -> ModelLoad:
    engine, ready = model.client.stats, model.client.ready
    if engine is None or ready is None:
        return ModelLoad(model.name, model.status)
    used = engine.blocks_total - engine.blocks_free - engine.blocks_cached
    return ModelLoad(
        model.name,
        model.status,
        running=engine.running,
        waiting=engine.waiting,
        waiting_tokens=sum(engine.waiting_tokens) + sum(engine.running_prefill_tokens),
        kv_used=round(used / max(engine.blocks_total, 1), 4),
        step_ms=round(1e3 * engine.mean_step_s, 3),
        tokens_per_s=round(engine.tokens_per_s, 1),
        rows_free=engine.rows_free,
        block_tokens=ready.block_size,
    )
