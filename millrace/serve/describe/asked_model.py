"""Which model a request for figures is about: `?model=NAME`, else the first."""

from __future__ import annotations

from aiohttp import web

from millrace.errors import EngineUnavailable
from millrace.link.messages import EngineReady
from millrace.observe.model_figures import ModelFigures
from millrace.serve.served_models import ServedModel, as_asked
from millrace.serve.state import STATE, FrontState


def asked_model(request: web.Request) -> ServedModel[FrontState]:
    """Raises `ModelNotFound`. Neither loads the model nor reads its tokenizer."""
    state = request.app[STATE]
    return state.models.find(request.query.get("model") or state.model_name)


def figures_of(request: web.Request, model: ServedModel[FrontState]) -> ModelFigures:
    return request.app[STATE].metrics.models[model.name]


def loaded_engine(request: web.Request, model: ServedModel[FrontState]) -> EngineReady:
    """Limits of the model's engine. Figures are not worth loading a model for."""
    ready = model.client.ready
    if ready is None:
        why = model.client.failure or f"The model {model.name!r} is {model.status}, so it runs no steps."
        raise EngineUnavailable(as_asked(why, model.name, request.query.get("model")))
    return ready
