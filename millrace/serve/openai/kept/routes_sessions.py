"""/v1/sessions: conversations that the server keeps, with their keys and values."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Raw

from millrace.errors import BadRequest, EngineUnavailable
from millrace.link.handle_messages import HandleFigures, HandleList
from millrace.params.classes import CLASS_NAMES
from millrace.serve.generate.checks import check_metadata
from millrace.serve.generate.fields.priority import PriorityClass, priority_of
from millrace.serve.generate.fields.retaining import MAX_TTL_S
from millrace.serve.generate.fields.session import with_session
from millrace.serve.generate.messages import Message as InternalMessage
from millrace.serve.generate.respond import respond_to
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query, page_of
from millrace.serve.http.schema import Strict, described
from millrace.serve.openai.routes import STREAM
from millrace.serve.openai.schemas import Message
from millrace.serve.openai.translate_chat import prepare_chat
from millrace.serve.openai.translate_messages import conversation_of
from millrace.serve.sessions import store
from millrace.serve.sessions.store import LastTurn, Session, handle_of
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import owner_of

DEFAULT_TTL_S = 3600.0
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TTL = described("Seconds for which it lives after its last turn.", minimum=1, maximum=MAX_TTL_S)


class SessionRequest(Strict, kw_only=True):
    """The body of POST /v1/sessions."""

    model: Annotated[str | None, described("Name of the served model; default: the first model.")] = None
    id: Annotated[
        str | None, described("Its name: 1 to 128 letters, digits and the characters . _ : -. Default: a new one.")
    ] = None
    system: Annotated[str | None, described("A system prompt; short for `messages` with one.")] = None
    messages: Annotated[list[Message] | None, described("Messages that the conversation begins with.")] = None
    ttl_s: Annotated[float, _TTL] = DEFAULT_TTL_S
    priority: Annotated[PriorityClass | None, described("Class of its turns that name none.")] = None
    max_bytes: Annotated[
        int, described("Quota of its keys and values; a turn beyond it is refused. 0: no quota of its own.", minimum=0)
    ] = 0
    metadata: Annotated[dict[str, str] | None, described("Labels.")] = None


class SessionChange(Strict, kw_only=True):
    """The body of POST /v1/sessions/{session_id}/renew and /fork; it may be empty."""

    ttl_s: Annotated[float | None, _TTL] = None
    id: Annotated[str | None, described("Of the fork; only for /fork. Default: a new one.")] = None


class SessionKv(msgspec.Struct):
    """The keys and values that a session owns."""

    tokens: int
    """In whole blocks."""
    bytes: int
    locations: dict[str, int]
    """Tokens by the nearest location that has them: `device`, and the tiers below it. The others are computed again."""


class SessionTurn(msgspec.Struct):
    """Where the prompt tokens of a turn came from."""

    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    """Of the cached ones: those that were not on the device when the turn arrived."""
    computed_tokens: int
    output_tokens: int
    recomputed_tokens: int
    """Of the computed ones: those that an earlier turn had computed. Their keys and values were evicted, or the
    conversation is written in another way now."""


class SessionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    model: str
    created_at: float
    used_at: float
    ttl_s: float
    expires_at: float
    priority: str | None
    max_bytes: int
    metadata: dict[str, str]
    messages: int
    tokens: int
    """Of the conversation so far."""
    turns: int
    prompt_tokens: int
    """Of all its turns."""
    hit_tokens: int
    """Those of them that were cached."""
    last_turn: SessionTurn | None
    kv: SessionKv | None
    """None: nothing is kept now; the next turn computes the whole conversation."""


class SessionList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[SessionAnswer]
    first_id: str
    last_id: str
    has_more: bool


class SessionDeleted(msgspec.Struct):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


_create, _change = BodyDecoder(SessionRequest), BodyDecoder(SessionChange)


async def create(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _create.decode(await read_body(request, state.body_limit_bytes))
    state = await state.for_model(body.model)
    check_metadata(body.metadata)
    if body.max_bytes < 0:
        raise BadRequest(f"max_bytes is {body.max_bytes}; send 0 or more.", param="max_bytes")
    session = store.new_session(
        checked_name(body.id),
        model=state.model_name,
        ttl_s=checked_ttl(body.ttl_s),
        priority=priority_of(body.priority),
        max_bytes=body.max_bytes,
        metadata=body.metadata or {},
        messages=_first_messages(body),
    )
    await state.store.run(state.store.forget_expired)
    await state.store.run(store.add, session, owner_of(request))
    return json_answer(request, _shown(session, None))


def checked_name(name: str | None) -> str | None:
    if name is not None and not _NAME.fullmatch(name):
        raise BadRequest(f"id is {name[:80]!r}; use 1 to 128 letters, digits and the characters . _ : -", param="id")
    return name


def checked_ttl(ttl_s: float) -> float:
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise BadRequest(f"ttl_s is {ttl_s:g}; it must be between 1 and {MAX_TTL_S:.0f}.", param="ttl_s")
    return ttl_s


def _first_messages(body: SessionRequest) -> list[InternalMessage]:
    first = [] if body.system is None else [InternalMessage("system", body.system)]
    return first + conversation_of(body.messages or [], None, None, None).messages


async def turn(request: web.Request) -> web.StreamResponse:
    """A chat completion that continues the session."""
    state, name = request.app[STATE], request.match_info["session_id"]
    received = time.monotonic()
    data = with_session(request, await read_body(request, state.body_limit_bytes))
    return await respond_to(request, data, partial(_prepare_turn, name), received, STREAM)


async def _prepare_turn(name: str, state: FrontState, data: bytes, received: float, owner: str) -> Work:
    session = await state.store.run(store.get, name, owner)
    try:
        body = msgspec.json.decode(data, type=dict[str, Raw])
    except msgspec.DecodeError:
        return await prepare_chat(state, data, received, owner)  # It says what is wrong.
    encoded = Raw(msgspec.json.encode(name))
    if body.get("session_id", encoded) != encoded:
        raise BadRequest("'session_id' and the path name different sessions; leave one out.", param="session_id")
    model = {"model": Raw(msgspec.json.encode(session.model))}
    return await prepare_chat(state, msgspec.json.encode({**model, **body, "session_id": encoded}), received, owner)


async def listing(request: web.Request) -> web.Response:
    check_query(request, ("limit", "order", "after"))
    page = page_of(request, most=1000, usual=100)
    state, owner = request.app[STATE], owner_of(request)
    sessions, has_more = await state.store.run(store.listing, owner, page)
    kept = await _kept(state, owner)
    data = [_shown(one, kept.get((one.model, one.handle))) for one in sessions]
    first, last = (data[0].id, data[-1].id) if data else ("", "")
    return json_answer(request, SessionList(data=data, first_id=first, last_id=last, has_more=has_more))


async def describe(request: web.Request) -> web.Response:
    check_query(request, ())
    state, owner = request.app[STATE], owner_of(request)
    return json_answer(request, await described_session(state, request.match_info["session_id"], owner))


async def described_session(state: FrontState, session_id: str, owner: str) -> SessionAnswer:
    session = await state.store.run(store.get, session_id, owner)
    return _shown(session, (await _kept(state, owner)).get((session.model, session.handle)))


async def renew(request: web.Request) -> web.Response:
    state, owner, asked = request.app[STATE], owner_of(request), await _asked(request)
    if asked.id is not None:
        raise BadRequest("'id' is for forks; remove it.", param="id")
    session = await state.store.run(store.renew, request.match_info["session_id"], owner, asked.ttl_s)
    await ask_engine(state, session, "renew_handle", owner, str(session.ttl_s))
    return json_answer(request, _shown(session, (await _kept(state, owner)).get((session.model, session.handle))))


async def fork(request: web.Request) -> web.Response:
    """A second session with the same past, which shares its blocks."""
    state, owner, asked = request.app[STATE], owner_of(request), await _asked(request)
    name = request.match_info["session_id"]
    session = await state.store.run(store.fork, name, owner, asked.ttl_s, checked_name(asked.id))
    await ask_engine(state, session, "copy_handle", owner, session.handle, of=handle_of(name))
    await ask_engine(state, session, "renew_handle", owner, str(session.ttl_s))
    return json_answer(request, _shown(session, (await _kept(state, owner)).get((session.model, session.handle))))


async def delete(request: web.Request) -> web.Response:
    state, owner = request.app[STATE], owner_of(request)
    session = await state.store.run(store.delete, request.match_info["session_id"], owner)
    await ask_engine(state, session, "drop_handles", owner)
    return json_answer(request, SessionDeleted(session.id))


async def _asked(request: web.Request) -> SessionChange:
    data = await read_body(request, request.app[STATE].body_limit_bytes)
    asked = _change.decode(data) if data.strip() else SessionChange()
    if asked.ttl_s is not None:
        checked_ttl(asked.ttl_s)
    return asked


async def ask_engine(
    state: FrontState,
    session: Session,
    kind: Literal["renew_handle", "copy_handle", "drop_handles"],
    owner: str,
    value: str = "",
    of: str = "",
) -> None:
    """Tell the engine of a session's model; without one nothing is kept that could change."""
    for model in state.models:
        if model.name == session.model and model.client.ready is not None and model.client.failure is None:
            try:
                await model.client.query(kind, of or session.handle, owner, value)
            except EngineUnavailable:  # It died meanwhile, and what it kept with it.
                return


async def _kept(state: FrontState, owner: str) -> dict[tuple[str, str], HandleFigures]:
    """The owner's handles by model and name."""
    found: dict[tuple[str, str], HandleFigures] = {}
    for model in state.models:
        if model.client.ready is not None and model.client.failure is None:
            try:
                reply = await model.client.query("handles", "", owner)
            except EngineUnavailable:
                continue
            for one in msgspec.json.decode(reply, type=HandleList).handles if reply else ():
                found[model.name, one.name] = one
    return found


def _shown(session: Session, kept: HandleFigures | None) -> SessionAnswer:
    return SessionAnswer(
        id=session.id,
        model=session.model,
        created_at=session.created_at,
        used_at=session.used_at,
        ttl_s=session.ttl_s,
        expires_at=session.expires_at,
        priority=None if session.priority is None else CLASS_NAMES[session.priority],
        max_bytes=session.max_bytes,
        metadata=session.metadata,
        messages=len(session.messages),
        tokens=len(session.token_ids),
        turns=session.turns,
        prompt_tokens=session.prompt_tokens,
        hit_tokens=session.hit_tokens,
        last_turn=None if session.last_turn is None else _shown_turn(session.last_turn),
        kv=None if kept is None else SessionKv(kept.tokens, kept.bytes, kept.locations),
    )


def _shown_turn(turn: LastTurn) -> SessionTurn:
    counts = (turn.prompt_tokens, turn.cached_tokens, turn.loaded_tokens, turn.computed_tokens, turn.output_tokens)
    return SessionTurn(*counts, turn.recomputed_tokens)
