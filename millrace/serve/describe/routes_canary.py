"""/v1/adapters/NAME/canary: gives a share of an adapter's requests to a new version, promotes it, or takes it back."""

from __future__ import annotations

import asyncio
from typing import Annotated

from aiohttp import web

from millrace.errors import AdapterError, ModelError, ModelNotFound
from millrace.link.adapter_messages import AdapterAnswer, AddCanary
from millrace.serve.describe.routes_adapters import check_may_manage, named, shown
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.schema import Strict, described
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.sources.adapters.find import adapter_folder


class CanaryRequest(Strict, kw_only=True):
    """The body of POST /v1/adapters/NAME/canary."""

    path: Annotated[
        str,
        described("Directory of the new version on the server's machine, or `org/repo` on the hub.", minLength=1),
    ]
    share: Annotated[
        float, described("Of the adapter's requests: 0.1 is every tenth.", exclusiveMinimum=0, maximum=1)
    ] = 0.1
    max_failed: Annotated[
        float,
        described(
            "Take it back when more of its requests fail than the old one's, by this share.", minimum=0, maximum=1
        ),
    ] = 0.05
    max_slowdown: Annotated[
        float, described("Take it back when a token takes more than so many times as long.", minimum=1)
    ] = 1.5


_canary_body = BodyDecoder(CanaryRequest)


async def start(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_may_manage(request, state)
    body = _canary_body.decode(await read_body(request, state.body_limit_bytes))
    model, name = named(request, request.match_info["name"])
    try:
        max_bytes, offline = state.config.adapters.max_bytes, state.config.model.offline
        folder = await asyncio.to_thread(adapter_folder, body.path, max_bytes=max_bytes, offline=offline)
    except ModelError as error:
        raise AdapterError(error.message, param="path") from error
    asked = AddCanary(name, str(folder), body.share, body.max_failed, body.max_slowdown)
    return _answered(request, model, await model.client.adapters.add_canary(asked))


async def promote(request: web.Request) -> web.Response:
    return await _end(request, promotes=True)


async def abort(request: web.Request) -> web.Response:
    return await _end(request, promotes=False)


async def _end(request: web.Request, *, promotes: bool) -> web.Response:
    check_may_manage(request, request.app[STATE])
    model, name = named(request, request.match_info["name"])
    return _answered(request, model, await model.client.adapters.end_canary(name, promotes=promotes))


def _answered(request: web.Request, model: ServedModel[FrontState], answer: AdapterAnswer) -> web.Response:
    if answer.is_unknown:
        raise ModelNotFound(answer.error, param="name")
    if answer.error:
        raise AdapterError(answer.error, param="path")
    return json_answer(request, shown(model, answer.adapters[0], has_path=True))
