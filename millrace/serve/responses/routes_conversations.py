"""/v1/conversations: create, retrieve, update, delete, and the items."""

from __future__ import annotations

from aiohttp import web
from msgspec import Raw, UnsetType

from millrace.errors import BadRequest
from millrace.serve.generate.checks import check_metadata
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query, page_of
from millrace.serve.responses import conversations as store
from millrace.serve.responses.included import check_include
from millrace.serve.responses.schemas import (
    ConversationDeleted,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
)
from millrace.serve.responses.translate import input_items
from millrace.serve.state import STATE
from millrace.serve.tenancy.owner import owner_of

MAX_ADDED = 20
"""Items added at once, as at OpenAI."""

_create = BodyDecoder(ConversationRequest)
_update = BodyDecoder(ConversationUpdate)
_items = BodyDecoder(ConversationItemsRequest)


async def create(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _create.decode(await read_body(request, state.body_limit_bytes) if request.can_read_body else b"{}")
    check_metadata(body.metadata)
    sent = b"[]" if isinstance(body.items, UnsetType) else bytes(body.items).strip()
    items = [] if sent in (b"null", b"[]") else input_items(Raw(sent), "items")
    _check_count(len(items))
    made = await state.store.run(store.create, owner_of(request), body.metadata or {}, items)
    return json_answer(request, made)


def _check_count(count: int) -> None:
    if count > MAX_ADDED:
        raise BadRequest(f"items has {count} entries; at most {MAX_ADDED} are allowed at once.", param="items")


async def retrieve(request: web.Request) -> web.Response:
    conversation_id, owner = request.match_info["conversation_id"], owner_of(request)
    return json_answer(request, await request.app[STATE].store.run(store.get, conversation_id, owner))


async def update(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _update.decode(await read_body(request, state.body_limit_bytes))
    check_metadata(body.metadata)
    conversation_id, owner = request.match_info["conversation_id"], owner_of(request)
    return json_answer(request, await state.store.run(store.relabel, conversation_id, owner, body.metadata or {}))


async def delete(request: web.Request) -> web.Response:
    conversation_id, owner = request.match_info["conversation_id"], owner_of(request)
    await request.app[STATE].store.run(store.delete, conversation_id, owner)
    return json_answer(request, ConversationDeleted(conversation_id))


async def list_items(request: web.Request) -> web.Response:
    check_query(request, ("limit", "order", "after", "include"))
    check_include(request)
    page = page_of(request, most=100, usual=20)
    conversation_id, owner = request.match_info["conversation_id"], owner_of(request)
    return json_answer(request, await request.app[STATE].store.run(store.list_items, conversation_id, owner, page))


async def add_items(request: web.Request) -> web.Response:
    check_query(request, ("include",))
    check_include(request)
    state = request.app[STATE]
    items = input_items(_items.decode(await read_body(request, state.body_limit_bytes)).items, "items")
    _check_count(len(items))
    conversation_id, owner = request.match_info["conversation_id"], owner_of(request)
    return json_answer(request, await state.store.run(store.add_items, conversation_id, owner, items))


async def retrieve_item(request: web.Request) -> web.Response:
    check_query(request, ("include",))
    check_include(request)
    names, owner = request.match_info, owner_of(request)
    found = await request.app[STATE].store.run(store.get_item, names["conversation_id"], owner, names["item_id"])
    return json_answer(request, found)


async def delete_item(request: web.Request) -> web.Response:
    names, owner = request.match_info, owner_of(request)
    left = await request.app[STATE].store.run(store.delete_item, names["conversation_id"], owner, names["item_id"])
    return json_answer(request, left)
