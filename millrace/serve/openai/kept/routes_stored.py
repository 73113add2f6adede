"""GET, POST and DELETE of /v1/chat/completions: completions made with `store`."""

from __future__ import annotations

import re
from typing import Annotated

from aiohttp import web

from millrace.errors import BadRequest
from millrace.serve.generate.checks import check_metadata
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import Page, page_of
from millrace.serve.http.schema import Strict, described
from millrace.serve.openai.kept import stored_chat as store
from millrace.serve.state import STATE
from millrace.serve.tenancy.owner import owner_of

_LABEL = re.compile(r"metadata\[(.*)\]")


class ChatUpdate(Strict, kw_only=True):
    """The body of POST /v1/chat/completions/{completion_id}."""

    metadata: Annotated[dict[str, str] | None, described("Labels; they replace the old ones.")]


_update = BodyDecoder(ChatUpdate)


async def listing(request: web.Request) -> web.Response:
    labels = {}
    for name, value in request.query.items():
        label = _LABEL.fullmatch(name)
        if label is not None:
            labels[label[1]] = value
        elif name not in ("model", "limit", "order", "after"):
            raise BadRequest(
                f"'{name[:80]}' is not a query parameter of {request.path}; remove it.",
                param=name[:200],
                code="unknown_field",
            )
    state = request.app[STATE]
    page = _page(request)
    if request.query.get("model", state.model_name) != state.model_name:
        return json_answer(request, store.StoredList("list", [], "", "", False))
    return json_answer(request, await state.store.run(store.listing, owner_of(request), page, labels))


def _page(request: web.Request) -> Page:
    """Oldest first, unless asked otherwise."""
    page = page_of(request, most=100, usual=20)
    return page if "order" in request.query else Page(page.limit, False, page.after)


async def retrieve(request: web.Request) -> web.Response:
    found = await request.app[STATE].store.run(store.get, request.match_info["completion_id"], owner_of(request))
    return json_answer(request, found)


async def update(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _update.decode(await read_body(request, state.body_limit_bytes))
    check_metadata(body.metadata)
    completion_id, owner = request.match_info["completion_id"], owner_of(request)
    return json_answer(request, await state.store.run(store.relabel, completion_id, owner, body.metadata or {}))


async def delete(request: web.Request) -> web.Response:
    completion_id = request.match_info["completion_id"]
    await request.app[STATE].store.run(store.delete, completion_id, owner_of(request))
    return json_answer(request, store.StoredDeleted(completion_id))


async def list_messages(request: web.Request) -> web.Response:
    for name in request.query:
        if name not in ("limit", "order", "after"):
            raise BadRequest(f"'{name[:80]}' is not a query parameter here; remove it.", param=name[:200])
    completion_id, owner = request.match_info["completion_id"], owner_of(request)
    return json_answer(
        request, await request.app[STATE].store.run(store.messages, completion_id, owner, _page(request))
    )
