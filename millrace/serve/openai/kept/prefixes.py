"""/v1/cache: prompts that stay cached under a name, for a time and within a quota."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Raw, UnsetType

from millrace.errors import BadRequest, CacheFull, MillraceError, NotFound
from millrace.link.handle_messages import HandleFigures, HandleList
from millrace.params.keeping import Retain
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Usage
from millrace.serve.generate.fields.retaining import MAX_TTL_S
from millrace.serve.generate.job import CACHE_RETRY_S, Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.work import Work
from millrace.serve.generate.writer import TextOnly
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode, json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.http.schema import Strict, described
from millrace.serve.openai.translate_chat import prepare_chat
from millrace.serve.openai.translate_completions import prepare_completion
from millrace.serve.served_models import ServedModel
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.owner import is_operator, owner_of, tenant_of
from millrace.serve.transfer.kv_file import read_key
from millrace.serve.transfer.prefixes import check_keeping, facts_of, handle_export, put_in, receive, send_export

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class CacheRequest(Strict, kw_only=True):
    """The body of POST /v1/cache."""

    model: Annotated[str | None, described("Name of the served model; default: the first model.")] = None
    prompt: Annotated[Raw | UnsetType, described("A text or token ids, as in `/v1/completions`.")] = UNSET
    messages: Annotated[Raw | UnsetType, described("Or messages, as in `/v1/chat/completions`.")] = UNSET
    tools: Annotated[Raw | UnsetType, described("Tools, as there.")] = UNSET
    chat_template_kwargs: Annotated[Raw | UnsetType, described("Variables of the chat template, as there.")] = UNSET
    cache_salt: Annotated[Raw | UnsetType, described("Requests that use the prompt must have the same.")] = UNSET
    timeout: Annotated[Raw | UnsetType, described("Seconds until the request fails.")] = UNSET
    name: Annotated[
        str | None, described("Name of the handle; one of that name is replaced. Default: a name by its content.")
    ] = None
    ttl_s: Annotated[float, described("Seconds for which it stays cached.", minimum=1, maximum=MAX_TTL_S)] = 300.0


class CacheHandle(msgspec.Struct, kw_only=True):
    """A prompt that stays cached."""

    id: str
    object: Literal["cache.handle"] = "cache.handle"
    model: str
    tenant: str
    tokens: int
    resident_tokens: int
    """Those of them, from the first on, that need not be computed now. Fewer where memory was short: they are computed
    by the next request, and kept again."""
    locations: dict[str, int]
    """Tokens by the nearest location that has their block: `device`, and the tiers below it."""
    bytes: int
    age_s: float
    ttl_s: float
    expires_in_s: float
    is_hint: bool
    """Made by `cache_control` or `prompt_cache_retention`: newer ones may take its place."""


class CreatedHandle(msgspec.Struct, kw_only=True):
    """The answer to POST /v1/cache."""

    id: str
    object: Literal["cache.handle"] = "cache.handle"
    model: str
    tokens: int
    """Of the prompt, as whole blocks."""
    ttl_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were cached before."""
    created_tokens: int
    """Prompt tokens that were computed and are kept now."""


class CacheHandles(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[CacheHandle]
    used_bytes: int
    """KV memory of the handles that the key may see."""
    max_bytes: int
    """That the handles of all tenants may have together."""


class ImportedHandle(msgspec.Struct, kw_only=True):
    """The answer to POST /v1/cache/import."""

    id: str
    object: Literal["cache.handle"] = "cache.handle"
    model: str
    tokens: int
    ttl_s: float


class DeletedHandle(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["cache.handle.deleted"] = "cache.handle.deleted"
    deleted: bool = True


_decoder = BodyDecoder(CacheRequest)
_CHAT_ONLY = ("tools", "chat_template_kwargs")


async def create(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_cache, None)


async def prepare_cache(state: FrontState, data: bytes, received: float, owner: str) -> Work:
    body = _decoder.decode(data)
    retain = _retain(body)
    given = {name: getattr(body, name) for name in ("model", "cache_salt", "timeout", *_CHAT_ONLY)}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not UNSET and value is not None}
    fields |= {"max_tokens": 1, "temperature": 0}
    if isinstance(body.messages, UnsetType) == isinstance(body.prompt, UnsetType):
        raise BadRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if isinstance(body.messages, UnsetType):
        for name in _CHAT_ONLY:
            if name in fields:
                raise BadRequest(f"'{name}' belongs to 'messages'; remove it.", param=name)
        work = await prepare_completion(state, encode({**fields, "prompt": body.prompt}), received, owner)
    else:
        chat = {**fields, "messages": body.messages, "add_generation_prompt": False}
        work = await prepare_chat(state, encode(chat), received, owner)
    generation = work.generation
    check_keeping(work.state)
    if len(generation.prompts) != 1:
        raise BadRequest("'prompt' is a list of prompts; send one.", param="prompt")
    return Work(work.state, dataclasses.replace(generation, retain=retain), partial(CacheWriter, retain=retain))


def _retain(body: CacheRequest) -> Retain:
    if not 1 <= body.ttl_s <= MAX_TTL_S:
        raise BadRequest(f"ttl_s is {body.ttl_s:g}; it must be between 1 and {MAX_TTL_S:.0f}.", param="ttl_s")
    if body.name is not None and not _NAME.fullmatch(body.name):
        raise BadRequest(
            f"name is {body.name[:80]!r}; use 1 to 128 letters, digits and the characters . _ : -", param="name"
        )
    return Retain(body.ttl_s, body.name or "", is_hint=False)


class CacheWriter(TextOnly):
    """The answer to a prompt that is only to be cached. It is never streamed."""

    def __init__(self, job: Job, retain: Retain) -> None:
        self.limit_names: dict[str, str] = {}
        self._job = job
        self._retain = retain

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        finish, block = choices[0].finish, self._job.state.config.plan.block_size
        if usage.prompt_tokens < block:
            raise BadRequest(
                f"Blocks of {block} tokens are kept, and the prompt has only {usage.prompt_tokens}. Send a longer one.",
                param="prompt",
            )
        if finish is not None and finish.refused:
            raise CacheFull(finish.refused, retry_after_s=CACHE_RETRY_S)
        if finish is None or not finish.retained_tokens:
            raise BadRequest("This server caches no prompts of this model.", code="cache_disabled")
        return encode(
            CreatedHandle(
                id=finish.handle,
                model=self._job.state.model_name,
                tokens=finish.retained_tokens,
                ttl_s=self._retain.ttl_s,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                created_tokens=usage.created_tokens,
            )
        )

    def preamble(self, choices: list[Choice]) -> bytes:
        raise AssertionError("these answers are not streamed")

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        raise AssertionError("these answers are not streamed")

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        raise AssertionError("these answers are not streamed")

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        raise AssertionError("these answers are not streamed")

    def finish_frame(self, choice: Choice) -> bytes:
        raise AssertionError("these answers are not streamed")

    def end_frames(self, usage: Usage) -> bytes:
        raise AssertionError("these answers are not streamed")

    def error_frames(self, error: MillraceError) -> bytes:
        raise AssertionError("these answers are not streamed")


async def listing(request: web.Request) -> web.Response:
    check_query(request, ("model",))
    tenant = None if is_operator(request) else owner_of(request)
    return json_answer(request, await _handles(request, tenant))


async def describe(request: web.Request) -> web.Response:
    check_query(request, ("model",))
    tenant = None if is_operator(request) else owner_of(request)
    for handle in (await _handles(request, tenant)).data:
        if handle.id == request.match_info["name"]:
            return json_answer(request, handle)
    raise _missing(request)


async def delete(request: web.Request) -> web.Response:
    """Of the key's own tenant; an operator may name another."""
    check_query(request, ("model", "tenant"))
    owner = request.query.get("tenant", owner_of(request)) if is_operator(request) else owner_of(request)
    name = request.match_info["name"]
    replies = [await model.client.query("drop_handles", name, owner) for model in _models(request)]
    if not any(reply and msgspec.json.decode(reply, type=int) for reply in replies):
        raise _missing(request)
    return json_answer(request, DeletedHandle(id=name))


async def export(request: web.Request) -> web.StreamResponse:
    """A signed file with the prompt's tokens, keys and values."""
    check_query(request, ("model",))
    state = await request.app[STATE].for_model(request.query.get("model"))
    read_key(state.config.memory.kv_export_key)
    name = request.match_info["name"]
    facts = await facts_of(state, name, owner_of(request))
    return await send_export(request, state, facts, handle_export(facts, name))


async def import_file(request: web.Request) -> web.Response:
    check_query(request, ("model", "name"))
    state = await request.app[STATE].for_model(request.query.get("model"))
    read_key(state.config.memory.kv_export_key)
    name = request.query.get("name")
    if name is not None and not _NAME.fullmatch(name):
        raise BadRequest(
            f"name is {name[:80]!r}; use 1 to 128 letters, digits and the characters . _ : -", param="name"
        )
    received = await receive(request, state, await facts_of(state, "", owner_of(request)))
    with received.parts:
        header = received.header
        if header.session:
            raise BadRequest("The file holds a session; send it to /v1/sessions/import.", code="kv_file_session")
        retain = Retain(header.ttl_s, name or header.name, is_hint=False)
        await put_in(state, received, tenant_of(request), retain)
    answer = ImportedHandle(id=retain.name, model=state.model_name, tokens=len(header.tokens) // 4, ttl_s=header.ttl_s)
    return json_answer(request, answer)


def _missing(request: web.Request) -> NotFound:
    name = request.match_info["name"]
    return NotFound(f"There is no cache handle {name[:128]!r}; it may have expired.", param="name")


def _models(request: web.Request) -> list[ServedModel[FrontState]]:
    """The model that was asked for, or all, as far as they are loaded."""
    state, name = request.app[STATE], request.query.get("model")
    asked = [state.models.find(name)] if name else list(state.models)
    return [model for model in asked if model.client.ready is not None and model.client.failure is None]


async def _handles(request: web.Request, tenant: str | None) -> CacheHandles:
    models = _models(request)
    replies = await asyncio.gather(*(model.client.query("handles", "", tenant) for model in models))
    none = HandleList([], 0, 0)
    lists = [msgspec.json.decode(reply, type=HandleList) if reply else none for reply in replies]
    data = [_shown(model.name, one) for model, found in zip(models, lists, strict=True) for one in found.handles]
    return CacheHandles(
        data=data, used_bytes=sum(one.used_bytes for one in lists), max_bytes=sum(one.max_bytes for one in lists)
    )


def _shown(model: str, one: HandleFigures) -> CacheHandle:
    return CacheHandle(
        id=one.name,
        model=model,
        tenant=one.owner,
        tokens=one.tokens,
        resident_tokens=one.resident_tokens,
        locations=one.locations,
        bytes=one.bytes,
        age_s=round(one.age_s, 3),
        ttl_s=one.ttl_s,
        expires_in_s=round(one.expires_in_s, 3),
        is_hint=one.is_hint,
    )
