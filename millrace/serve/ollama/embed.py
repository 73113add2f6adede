"""Ollama's POST /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.serve.generate.checks import check_range
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.gate import header_deadline
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond_to
from millrace.serve.generate.sampling import deadline_of
from millrace.serve.generate.vectors import (
    VectorWriter,
    check_embeds,
    encoded_inputs,
    pooling_of,
    vector_generation,
    vector_headers,
)
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.ids import new_id
from millrace.serve.http.json_answer import encode, json_answer
from millrace.serve.http.schema import Strict, described
from millrace.serve.ollama.keep_alive import check_keep_alive
from millrace.serve.ollama.schemas import OllamaOptions
from millrace.serve.ollama.translate import check_options, state_of_model
from millrace.serve.state import STATE, FrontState


class OllamaEmbedCommon(Strict, kw_only=True):
    model: Annotated[str, described("Name of a served model, with or without `:latest`.")]
    options: Annotated[OllamaOptions | None, described("Accepted; sampling has no effect on vectors.")] = None
    keep_alive: Annotated[str | float | None, described("As in /api/chat.")] = None


class OllamaEmbedRequest(OllamaEmbedCommon, kw_only=True):
    """The body of POST /api/embed."""

    input: Annotated[
        str | list[str] | None, described("A text or several; without any the request only loads the model.")
    ] = None
    truncate: Annotated[
        bool | None,
        described("Cut the end of inputs that are too long; `truncated_input_tokens` says how many tokens are gone."),
    ] = None
    dimensions: Annotated[int | None, described("Keep the first dimensions, again of length 1.", minimum=1)] = None


class OllamaEmbeddingsRequest(OllamaEmbedCommon, kw_only=True):
    """The body of POST /api/embeddings."""

    prompt: Annotated[str | None, described("The text; without one the request only loads the model.")] = None


class OllamaEmbedAnswer(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    """Of length 1."""
    total_duration: int = 0
    """Nanoseconds."""
    load_duration: int = 0
    prompt_eval_count: int = 0
    truncated_input_tokens: int | UnsetType = UNSET


class OllamaEmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


_embed_body = BodyDecoder(OllamaEmbedRequest)
_embeddings_body = BodyDecoder(OllamaEmbeddingsRequest)


async def embed(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _embed_body.decode(await read_body(request, state.body_limit_bytes))
    check_range("dimensions", body.dimensions, 1, 2**31 - 1)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    state = await _state_for(body, state)
    if not any(texts):
        return await _load(request, state, body, OllamaEmbedAnswer(state.model_name, []))

    async def prompts() -> list[Prompt]:
        return await encoded_inputs(state, texts, "input", may_cut=bool(body.truncate))

    return await _respond(
        request, state, body, prompts, lambda job: EmbedWriter(job, received, body.dimensions), received
    )


async def embeddings(request: web.Request) -> web.StreamResponse:
    state, received = request.app[STATE], time.monotonic()
    body = _embeddings_body.decode(await read_body(request, state.body_limit_bytes))
    state, text = await _state_for(body, state), body.prompt or ""
    if not text:
        return await _load(request, state, body, OllamaEmbeddingsAnswer([]))

    async def prompts() -> list[Prompt]:
        return await encoded_inputs(state, [text], "prompt")

    return await _respond(request, state, body, prompts, lambda job: OneVectorWriter("prompt"), received)


async def _state_for(body: OllamaEmbedCommon, state: FrontState) -> FrontState:
    state = await state_of_model(body.model, state)
    if body.options is not None:
        check_options(state, body.options)
    return state


async def _respond(
    request: web.Request,
    state: FrontState,
    body: OllamaEmbedCommon,
    prompts: Callable[[], Awaitable[list[Prompt]]],
    make_writer: Callable[[Job], VectorWriter],
    received: float,
) -> web.StreamResponse:
    keep_s = check_keep_alive(body.keep_alive, request)

    is_valid = False

    async def prepare(*_: object) -> Work:
        nonlocal is_valid
        await state.await_engine(body.model)
        check_embeds(state)
        generation = vector_generation(
            await prompts(),
            pooling=pooling_of(state),
            answer_id=new_id("embd-"),
            deadline=deadline_of(None, state.config, received),
        )
        is_valid = True
        return Work(state, generation, make_writer, headers=vector_headers(state))

    try:
        return await respond_to(request, b"", prepare, received, None)
    finally:
        if is_valid and keep_s is not None:
            await state.control.keep_alive(state.model_name, keep_s)


async def _load(
    request: web.Request, state: FrontState, body: OllamaEmbedCommon, empty: msgspec.Struct
) -> web.StreamResponse:
    """A request without an input loads the model, or unloads it if `keep_alive` is 0."""
    header_deadline(request, 0.0)
    keep_s = check_keep_alive(body.keep_alive, request)
    if keep_s != 0:
        await state.await_engine(body.model)
    if keep_s is not None:
        await state.control.keep_alive(state.model_name, keep_s)
    return json_answer(request, empty)


class EmbedWriter(VectorWriter):
    def __init__(self, job: Job, received: float, dimensions: int | None) -> None:
        super().__init__("input", dimensions)
        self._model = job.state.answers_as
        self._received = received

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        dropped = sum(choice.prompt.num_dropped for choice in choices)
        return encode(
            OllamaEmbedAnswer(
                self._model,
                [vector.tolist() for vector in self.vectors(choices)],
                total_duration=int((time.monotonic() - self._received) * 1e9),
                prompt_eval_count=usage.prompt_tokens,
                truncated_input_tokens=dropped or UNSET,
            )
        )


class OneVectorWriter(VectorWriter):
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        return encode(OllamaEmbeddingsAnswer(self.vectors(choices)[0].tolist()))
