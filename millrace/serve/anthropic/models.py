"""/v1/models as Anthropic's clients expect it. They are known by the header `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from aiohttp import web

from millrace.errors import NotFound
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query, page_of
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import tenant_of

HEADER = "anthropic-version"
MAX_PAGE = 1000


class AnthropicModel(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """When this server started, as RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    """Null until the model was loaded for the first time, like `max_tokens`."""
    max_tokens: int | None


class AnthropicModelList(msgspec.Struct, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def is_anthropic(request: web.Request) -> bool:
    return HEADER in request.headers


def described(state: FrontState, model: ServedModel[FrontState], name: str) -> AnthropicModel:
    limits = model.client.limits
    return described_as(name, state.started, limits.max_context if limits is not None else None)


def described_as(name: str, created: int, max_context: int | None) -> AnthropicModel:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(
        id=name, display_name=name, created_at=at, max_input_tokens=max_context, max_tokens=max_context
    )


def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    listed = state.models.listed(tenant_of(request).may_use)
    return answer_with(request, [described(state, model, name) for model, name, _ in listed])


def answer_with(request: web.Request, models: list[AnthropicModel]) -> web.Response:
    """The page that the request asks for."""
    check_query(request, ("limit", "after_id", "before_id"))
    limit = page_of(request, most=MAX_PAGE, usual=20).limit
    if (before := request.query.get("before_id")) is not None:
        earlier = models[: _place(models, before, "before_id")]
        page, has_more = earlier[-limit:], len(earlier) > limit
    else:
        after = request.query.get("after_id")
        later = models if after is None else models[_place(models, after, "after_id") + 1 :]
        page, has_more = later[:limit], len(later) > limit
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return json_answer(request, AnthropicModelList(data=page, has_more=has_more, first_id=ends[0], last_id=ends[1]))


def _place(models: list[AnthropicModel], name: str, param: str) -> int:
    for index, model in enumerate(models):
        if model.id == name:
            return index
    raise NotFound(f"'{param}' is {name[:80]!r}, which is not a model of this server.", param=param)
