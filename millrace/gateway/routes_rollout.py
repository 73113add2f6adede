"""Endpoints of rollouts and shadow traffic: POST begins one, GET shows it, DELETE ends it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, NotFound
from millrace.gateway.rollout.canary import Rollout, RolloutSettings
from millrace.gateway.rollout.shadow import Shadow, ShadowSettings
from millrace.gateway.routes_fleet import require_operator
from millrace.gateway.state import STATE, GatewayState
from millrace.serve.http.body import read_body
from millrace.serve.http.json_answer import json_answer

_T = TypeVar("_T")
_MAX_BYTES = 1 << 16


async def begin_rollout(request: web.Request) -> web.Response:
    require_operator(request)
    state, settings = request.app[STATE], await _settings(request, RolloutSettings)
    _require_group(state, settings.group)
    state.fleet.rollout = Rollout(settings, state.fleet.clock())
    return json_answer(request, state.fleet.rollout.describe(), status=201)


async def show_rollout(request: web.Request) -> web.Response:
    require_operator(request)
    return json_answer(request, _running(request.app[STATE].fleet.rollout, "rollout").describe())


async def end_rollout(request: web.Request) -> web.Response:
    """All groups get requests again, by policy and weight."""
    require_operator(request)
    state = request.app[STATE]
    last = _running(state.fleet.rollout, "rollout").describe()
    state.fleet.rollout = None
    return json_answer(request, last)


async def begin_shadow(request: web.Request) -> web.Response:
    require_operator(request)
    state, settings = request.app[STATE], await _settings(request, ShadowSettings)
    _require_group(state, settings.group)
    _end(state)
    state.shadow, state.fleet.shadow_group = Shadow(settings, state.session), settings.group
    return json_answer(request, state.shadow.describe(), status=201)


async def show_shadow(request: web.Request) -> web.Response:
    require_operator(request)
    return json_answer(request, _running(request.app[STATE].shadow, "shadow traffic").describe())


async def end_shadow(request: web.Request) -> web.Response:
    """The group's replicas get requests like the others again."""
    require_operator(request)
    state = request.app[STATE]
    last = _running(state.shadow, "shadow traffic").describe()
    _end(state)
    return json_answer(request, last)


def _end(state: GatewayState) -> None:
    if state.shadow is not None:
        state.shadow.close()
    state.shadow, state.fleet.shadow_group = None, ""


async def _settings(request: web.Request, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(await read_body(request, _MAX_BYTES), type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is wrong: {error}", code="invalid_json") from None


def _require_group(state: GatewayState, group: str) -> None:
    groups = {one.settings.group for one in state.fleet.replicas.values()}
    if group not in groups or len(groups) < 2:
        shown = ", ".join(sorted(filter(None, groups))) or "no replica has one"
        raise BadRequest(
            f"Group {group!r} must name some of the replicas and not all; groups: {shown}. Give replicas a 'group' in"
            " the fleet's file.",
            param="group",
        )


def _running(one: Any, what: str) -> Any:
    if one is None:
        raise NotFound(f"There is no {what} now; POST begins one.")
    return one
