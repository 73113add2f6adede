"""Ollama's endpoints: chat, generate, show, and the lists of models."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial

from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest
from millrace.serve.generate.gate import header_deadline
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.respond import answer
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.event_stream import JSON_LINES
from millrace.serve.http.json_answer import json_answer
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
    chat_generation,
    check_body,
    check_ollama_model,
    check_sampling,
    text_generation,
)
from millrace.serve.ollama.write import OllamaWriter, now
from millrace.serve.state import STATE, FrontState
from millrace.version import __version__

PATHS = "/api/"
"""Prefix of the paths whose errors have Ollama's shape."""

_chat_body = BodyDecoder(OllamaChatRequest)
_generate_body = BodyDecoder(OllamaGenerateRequest)
_show_body = BodyDecoder(OllamaShowRequest)


# ── generate ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def chat(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _chat_body.decode(await read_body(request, state.body_limit_bytes))
    check_body(body, state)
    if not body.messages:
        return _load(request, body, OllamaAnswerMessage("assistant", ""), UNSET)
    return await _respond(request, partial(chat_generation, state, body, received), received, is_chat=True)


async def generate(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _generate_body.decode(await read_body(request, state.body_limit_bytes))
    check_body(body, state)
    if not body.prompt:
        return _load(request, body, UNSET, "")
    return await _respond(request, partial(text_generation, state, body, received), received, is_chat=False)


async def _respond(
    request: web.Request, translate: Callable[[], Awaitable[Generation]], received: float, *, is_chat: bool
) -> web.StreamResponse:
    state = request.app[STATE]
    await state.await_engine()
    names = CHAT_NAMES if is_chat else GENERATE_NAMES
    work = Work(await translate(), partial(OllamaWriter, limit_names=names, is_chat=is_chat))
    return await answer(state, request, work, received, media_type=JSON_LINES)


def _load(
    request: web.Request, body: OllamaCommon, message: OllamaAnswerMessage | UnsetType, response: str | UnsetType
) -> web.Response:
    """A request without a prompt: Ollama loads the model; here it is already loaded."""
    header_deadline(request, 0.0)
    check_sampling(request.app[STATE], body)
    model_name = request.app[STATE].model_name
    return json_answer(request, OllamaAnswer(model_name, now(), message, response, done=True, done_reason="load"))


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────
async def tags(request: web.Request) -> web.Response:
    return json_answer(request, OllamaModels([_model(request.app[STATE])]))


async def loaded(request: web.Request) -> web.Response:
    state = request.app[STATE]
    ready = state.client.ready
    if ready is None:
        return json_answer(request, OllamaModels([]))
    on_gpu = ready.device.startswith("cuda")
    model = _model(state)
    model.context_length, model.size_vram = ready.max_context, model.size if on_gpu else 0
    model.expires_at = "9999-12-31T23:59:59Z"
    return json_answer(request, OllamaModels([model]))


async def show(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _show_body.decode(await read_body(request, state.body_limit_bytes))
    name = body.model if body.model is not None else body.name
    if name is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    check_ollama_model(name, state)
    model, ready = _model(state), state.client.ready
    info: dict[str, str | int | float | bool | None] = {"general.architecture": model.details.family}
    if ready is not None:
        info[f"{model.details.family}.context_length"] = ready.max_context
        info[f"{model.details.family}.vocab_size"] = ready.vocab_size
        if ready.num_parameters:
            info["general.parameter_count"] = ready.num_parameters
    return json_answer(
        request,
        OllamaShowAnswer(
            f"FROM {state.model_name}\n", "", state.template.source, model.details, info, ["completion"], _at(state)
        ),
    )


async def version(request: web.Request) -> web.Response:
    return json_answer(request, OllamaVersion(__version__))


def _model(state: FrontState) -> OllamaModel:
    ready = state.client.ready
    size = ready.memory_plan.get("weights", 0) if ready is not None else 0
    digest = hashlib.sha256((ready.fingerprint if ready is not None else "").encode()).hexdigest()
    family = str(state.model_facts.get("family", "unknown"))
    kind, dtype = str(state.model_facts.get("format", "unknown")), ready.dtype if ready is not None else ""
    parameters = _size_label(ready.num_parameters) if ready is not None else ""
    details = OllamaDetails("", kind, family, [family], parameters, dtype)
    return OllamaModel(state.model_name, state.model_name, _at(state), size, digest, details)


def _size_label(num_parameters: int) -> str:
    """As Ollama writes it: 134.48M, 8.0B."""
    if num_parameters >= 1e9:
        return f"{num_parameters / 1e9:.1f}B"
    return f"{num_parameters / 1e6:.2f}M" if num_parameters else ""


def _at(state: FrontState) -> str:
    return datetime.fromtimestamp(state.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
