"""Sessions as signed files: GET /v1/sessions/{id}/export and POST /v1/sessions/import."""

from __future__ import annotations

import time

import msgspec
import numpy as np
from aiohttp import web

from millrace.errors import BadRequest
from millrace.params.keeping import Retain
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.openai.kept.routes_sessions import checked_name, described_session
from millrace.serve.sessions import store
from millrace.serve.sessions.store import Session
from millrace.serve.state import STATE
from millrace.serve.tenancy.cache_scope import scope_of
from millrace.serve.tenancy.owner import owner_of, tenant_of
from millrace.serve.transfer.kv_file import read_key
from millrace.serve.transfer.prefixes import Exported, facts_of, put_in, receive, send_export


async def export_session(request: web.Request) -> web.StreamResponse:
    """What was said, and its keys and values."""
    check_query(request, ())
    front, owner = request.app[STATE], owner_of(request)
    read_key(front.config.memory.kv_export_key)
    session = await front.store.run(store.get, request.match_info["session_id"], owner)
    state = await front.for_model(session.model)
    facts = await facts_of(state, session.handle, owner)
    # The last token was drawn and is not computed yet.
    num_tokens = max(0, len(session.token_ids) - 1) // facts.block_tokens * facts.block_tokens
    exported = Exported(
        session.id,
        np.array(session.token_ids[:num_tokens], np.int32).tobytes(),
        scope_of(tenant_of(request), "", share_prefixes=state.config.server.share_prefixes),
        session.ttl_s,
        msgspec.msgpack.encode(session),
        _retain(session) if state.config.memory.kv_retained else None,
    )
    return await send_export(request, state, facts, exported)


async def import_session(request: web.Request) -> web.Response:
    check_query(request, ("model", "id"))
    state, owner = await request.app[STATE].for_model(request.query.get("model")), owner_of(request)
    read_key(state.config.memory.kv_export_key)
    name = checked_name(request.query.get("id"))
    received = await receive(request, state, await facts_of(state, "", owner))
    with received.parts:
        if not received.header.session:
            raise BadRequest("The file holds a handle; send it to /v1/cache/import.", code="kv_file_handle")
        sent = msgspec.msgpack.decode(received.header.session, type=Session)
        session = msgspec.structs.replace(
            sent, id=name or sent.id, model=state.model_name, created_at=time.time(), last_turn=None
        )
        session.use()
        await state.store.run(store.add, session, owner)
        try:
            await put_in(state, received, tenant_of(request), _retain(session))
        except BaseException:
            await state.store.run(store.delete, session.id, owner)
            raise
    return json_answer(request, await described_session(state, session.id, owner))


def _retain(session: Session) -> Retain:
    return Retain(session.ttl_s, session.handle, is_hint=False, handle_bytes=session.max_bytes, is_required=True)
