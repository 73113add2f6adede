"""/v1/models: list, describe, load and unload the models of this server."""

from __future__ import annotations

import asyncio

from aiohttp import web
from msgspec import UNSET

from millrace.errors import Forbidden
from millrace.serve.anthropic import models as anthropic
from millrace.serve.http.json_answer import json_answer
from millrace.serve.openai.answers import Model, ModelList, SuggestedModel
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.keyring import check_may_use
from millrace.serve.tenancy.owner import is_operator, tenant_of
from millrace.sources.suggestion import suggest

UNLOAD_WAIT_S = 10.0
"""How long the answer to an unload waits for the engine to stop."""


def _model(state: FrontState, model: ServedModel[FrontState], name: str, adapter: str = "") -> Model:
    limits = model.client.limits
    return Model(
        id=name,
        object="model",
        created=state.started,
        owned_by="millrace",
        max_model_len=limits.max_context if limits is not None else None,
        root=f"{model.name}:{adapter}" if adapter else model.name,
        status=model.status,
        parent=UNSET if not adapter and name in (model.name, *model.aliases) else model.name,
    )


async def list_models(request: web.Request) -> web.Response:
    if anthropic.is_anthropic(request):
        return anthropic.list_models(request)
    state = request.app[STATE]
    return json_answer(
        request, ModelList("list", [_model(state, *named) for named in state.models.listed(tenant_of(request).may_use)])
    )


async def get_model(request: web.Request) -> web.Response:
    state, name = request.app[STATE], request.match_info["model"]
    model, adapter = state.models.with_adapter(name)
    check_may_use(tenant_of(request), (name, *state.models.names_of(model, adapter)), name)
    if anthropic.is_anthropic(request):
        return json_answer(request, anthropic.described(state, model, name))
    described, own = _model(state, model, name, adapter), await state.for_model(name)
    described.capabilities, described.sampling = own.capabilities, own.sampling_defaults.fields()
    described.suggestion = await asyncio.to_thread(_suggestion, await _num_parameters(model))
    return json_answer(request, described)


async def _num_parameters(model: ServedModel[FrontState]) -> int:
    limits = model.client.limits
    return limits.num_parameters if limits is not None else (await model.file_facts()).num_parameters


def _suggestion(num_parameters: int) -> SuggestedModel | None:
    found = suggest(num_parameters)
    return SuggestedModel(found.name, found.download_bytes) if found is not None else None


async def load(request: web.Request) -> web.Response:
    """Load the model now, so that its first request does not wait. Answers when it is loaded."""
    state, name = request.app[STATE], request.match_info["model"]
    model, adapter = state.models.with_adapter(name)
    check_may_use(tenant_of(request), (name, *state.models.names_of(model, adapter)), name)
    await (await state.for_model(name)).await_engine(name)
    return json_answer(request, _model(state, model, name))


async def unload(request: web.Request) -> web.Response:
    """Unload the model when no request needs it. The answer's `status` is `loaded` if its requests still run."""
    state, name = request.app[STATE], request.match_info["model"]
    model = state.models.find(name)
    if not is_operator(request):
        raise Forbidden(
            "On a server with API keys only an operator's key unloads models (`millrace keys add --operator`).",
            param="model",
        )
    if model.client.ready is not None:
        await state.control.unload(model.name)
        await model.client.wait_unloaded(UNLOAD_WAIT_S)
    return json_answer(request, _model(state, model, name))
