"""Ollama's endpoints: chat, generate, show, and the lists of models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest, EngineUnavailable
from millrace.params.defaults import NEUTRAL_DEFAULTS, SamplingDefaults
from millrace.serve.created_models import CreatedModel
from millrace.serve.generate.fields.documents import documents_note
from millrace.serve.generate.fields.session import with_session
from millrace.serve.generate.gate import header_deadline
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.heartbeat import StreamForm
from millrace.serve.generate.respond import respond_to
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.event_stream import JSON_LINES
from millrace.serve.http.ids import warnings
from millrace.serve.http.json_answer import json_answer
from millrace.serve.ollama.keep_alive import check_keep_alive
from millrace.serve.ollama.schemas import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatRequest,
    OllamaCommon,
    OllamaDetails,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaModels,
    OllamaShowAnswer,
    OllamaShowRequest,
    OllamaVersion,
)
from millrace.serve.ollama.translate import (
    CHAT_NAMES,
    GENERATE_NAMES,
    SAMPLING,
    chat_generation,
    check_body,
    check_sampling,
    state_of_model,
    with_options,
)
from millrace.serve.ollama.translate_generate import text_generation
from millrace.serve.ollama.write import OllamaWriter, empty_line, error_line, now
from millrace.serve.served_models import ServedModel
from millrace.serve.sessions.turns import keeping_turn
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.keyring import check_may_use
from millrace.serve.tenancy.owner import owner_of, tenant_of
from millrace.version import __version__

PATHS = "/api/"
"""Prefix of the paths whose errors have Ollama's shape."""
OLLAMA_VERSION = "0.14.0"
"""Clients compare it: Copilot Chat wants 0.6.4, Codex 0.13.4 for /v1/responses. 0.14 brought /v1/messages."""
NEVER = "9999-12-31T23:59:59Z"
"""`expires_at` of a model that stays loaded."""
MAX_LEFT_S = 100 * 365 * 86400.0

_chat_body = BodyDecoder(OllamaChatRequest)
_generate_body = BodyDecoder(OllamaGenerateRequest)
_show_body = BodyDecoder(OllamaShowRequest)


# ── generate ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def chat(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    data = with_session(request, await read_body(request, state.body_limit_bytes))
    body = _chat_body.decode(data)
    state = await state_of_model(body.model, state)
    check_body(body)
    body = with_options(state, body)
    if not body.messages:
        return await _load(request, state, body, OllamaAnswerMessage("assistant", ""), UNSET)
    translate = partial(chat_generation, state, body, received, owner_of(request))
    return await _respond(request, data, state, body, translate, received)


async def generate(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    data = await read_body(request, state.body_limit_bytes)
    body = _generate_body.decode(data)
    state = await state_of_model(body.model, state)
    check_body(body)
    body = with_options(state, body)
    if not body.prompt:
        return await _load(request, state, body, UNSET, "")
    return await _respond(request, data, state, body, partial(text_generation, state, body, received), received)


async def _respond(
    request: web.Request,
    data: bytes,
    state: FrontState,
    body: OllamaChatRequest | OllamaGenerateRequest,
    translate: Callable[[], Awaitable[Generation]],
    received: float,
) -> web.StreamResponse:
    is_chat = isinstance(body, OllamaChatRequest)
    keep_s = check_keep_alive(body.keep_alive, request)
    ping = partial(empty_line, model=state.answers_as, is_chat=is_chat)

    is_valid = False

    async def prepare(*_: object) -> Work:
        nonlocal is_valid
        await state.await_engine(body.model)
        names = CHAT_NAMES if is_chat else GENERATE_NAMES
        writer, generation = partial(OllamaWriter, limit_names=names, is_chat=is_chat), await translate()
        work = keeping_turn(Work(state, generation, writer, headers=warnings([documents_note(generation)])))
        is_valid = True
        return work

    try:
        form = StreamForm(error_line, ping, JSON_LINES, is_usual=True)
        return await respond_to(request, data, prepare, received, form)
    finally:
        if is_valid and keep_s is not None:
            await state.control.keep_alive(state.model_name, keep_s)


async def _load(
    request: web.Request,
    state: FrontState,
    body: OllamaCommon,
    message: OllamaAnswerMessage | UnsetType,
    response: str | UnsetType,
) -> web.Response:
    """A request without a prompt loads the model, or unloads it if `keep_alive` is 0."""
    header_deadline(request, 0.0)
    check_sampling(state, body)
    keep_s = check_keep_alive(body.keep_alive, request)
    if keep_s != 0:
        await state.await_engine(body.model)
    if keep_s is not None:
        await state.control.keep_alive(state.model_name, keep_s)
    reason: Literal["load", "unload"] = "unload" if keep_s == 0 else "load"
    return json_answer(request, OllamaAnswer(state.answers_as, now(), message, response, done=True, done_reason=reason))


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def tags(request: web.Request) -> web.Response:
    state = request.app[STATE]
    names = [
        (model, name) for model, name, _ in state.models.listed(tenant_of(request).may_use) if name not in model.aliases
    ]
    return json_answer(request, OllamaModels([await _model(state, model, name) for model, name in names]))


async def loaded(request: web.Request) -> web.Response:
    state = request.app[STATE]
    may_use = tenant_of(request).may_use
    usable = (model for model in state.models if may_use(state.models.names_of(model)))
    shown = [await _loaded(state, model) for model in usable if model.status == "loaded"]
    return json_answer(request, OllamaModels(shown))


async def _loaded(state: FrontState, model: ServedModel[FrontState]) -> OllamaModel:
    shown, ready = await _model(state, model, model.name), model.client.ready
    if ready is not None:
        on_gpu = ready.device.startswith("cuda")
        shown.context_length, shown.size_vram = ready.max_context, shown.size if on_gpu else 0
    left_s = math.inf
    with contextlib.suppress(EngineUnavailable):
        left_s = await model.expires_in_s()
    at = datetime.now(UTC) + timedelta(seconds=left_s) if left_s < MAX_LEFT_S else None
    shown.expires_at = NEVER if at is None else at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return shown


async def show(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _show_body.decode(await read_body(request, state.body_limit_bytes))
    name = body.model if body.model is not None else body.name
    if name is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    state = await state_of_model(name, state)
    check_may_use(tenant_of(request), state.names, name)
    model, ready = await _model(state, state.models.find(state.model_name), state.answers_as), state.client.limits
    info: dict[str, str | int | float | bool | None] = {"general.architecture": model.details.family}
    if ready is not None:
        info[f"{model.details.family}.context_length"] = ready.max_context
        info[f"{model.details.family}.vocab_size"] = ready.vocab_size
        if ready.num_parameters:
            info["general.parameter_count"] = ready.num_parameters
    return json_answer(
        request,
        OllamaShowAnswer(
            _modelfile(state),
            "\n".join(f"{name:<30} {value}" for name, value in _parameters(state.sampling_defaults, state.made)),
            state.template.source,
            model.details,
            info,
            [name for name in state.capabilities if name != "chat"],
            model.modified_at,
        ),
    )


def _modelfile(state: FrontState) -> str:
    lines, made = [f"FROM {state.model_name}"], state.made
    if state.adapter:
        lines.append(f"ADAPTER {state.adapter}")
    if made is not None:
        lines += [f'SYSTEM """{made.system}"""'] if made.system else []
        lines += [f"PARAMETER {name} {value}" for name, value in _parameters(made.over(NEUTRAL_DEFAULTS), made)]
        lines += [f'LICENSE """{made.licence}"""'] if made.licence else []
    return "\n".join(lines) + "\n"


def _parameters(defaults: SamplingDefaults, made: CreatedModel | None) -> list[tuple[str, str]]:
    """By Ollama's names, as a Modelfile writes them."""
    own, options = defaults.fields(), made.options if made is not None else {}
    found = [(name, f"{own[ours]:g}") for name, ours in SAMPLING.items() if ours in own]
    found += [(name, json.dumps(value)) for name, value in options.items()]
    return found + [("stop", f'"{text}"') for text in defaults.stop]


async def version(request: web.Request) -> web.Response:
    return json_answer(request, OllamaVersion(OLLAMA_VERSION, __version__))


async def _model(state: FrontState, model: ServedModel[FrontState], name: str) -> OllamaModel:
    """From the model's files, so that it shows the same whether or not it is loaded."""
    facts, ready = await model.file_facts(), model.client.limits
    size = facts.num_bytes or (ready.memory_plan.get("weights", 0) if ready is not None else 0)
    num_parameters = facts.num_parameters or (ready.num_parameters if ready is not None else 0)
    quantisation = facts.quantisation or (ready.dtype if ready is not None else "")
    digest = facts.digest or hashlib.sha256(model.name.encode()).hexdigest()
    family = facts.family
    details = OllamaDetails("", facts.format, family, [family], _size_label(num_parameters), quantisation)
    at = _time(facts.modified) if facts.modified else _at(state)
    return OllamaModel(name, name, at, size, digest, details)


def _size_label(num_parameters: int) -> str:
    """As Ollama writes it: 134.48M, 8.0B."""
    if num_parameters >= 1e9:
        return f"{num_parameters / 1e9:.1f}B"
    return f"{num_parameters / 1e6:.2f}M" if num_parameters else ""


def _at(state: FrontState) -> str:
    return _time(state.started)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
