"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Raw

from millrace.errors import BadRequest
from millrace.link.vectors import Float32s
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.fields.priority import priority_of
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.sampling import deadline_of, salt_of
from millrace.serve.generate.vectors import (
    MAX_INPUTS,
    VectorWriter,
    check_embeds,
    encoded_inputs,
    pooling_of,
    vector_generation,
    vector_headers,
)
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.ids import new_id
from millrace.serve.http.inputs import input_schema, texts_or_tokens
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import Strict, described
from millrace.serve.openai.schemas import CacheSalt, Priority, Timeout
from millrace.serve.state import FrontState

EncodingFormat = Literal["float", "base64"]


class EmbeddingsRequest(Strict, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[
        Raw,
        described(f"A text, token ids, or a list of up to {MAX_INPUTS} of either.", **input_schema(min_chars=1)),
    ]
    encoding_format: Annotated[
        EncodingFormat | None, described("`float` (default), or `base64`: little-endian float32.")
    ] = None
    dimensions: Annotated[
        int | None,
        described("Keep the first dimensions, again of length 1: for models that were trained for it.", minimum=1),
    ] = None
    pooling: Annotated[
        Literal["last", "mean"] | None,
        described(
            "Of models that write text. `last`: the last token's hidden state after the final norm; `mean`: over all"
            " tokens. Default: what the model's files say, else `last`."
        ),
    ] = None
    prompt_name: Annotated[
        str | None, described("Which of the model's own prompts goes before each text, such as `query`.")
    ] = None
    truncate: Annotated[bool | None, described("Cut the ends of texts that are too long; else they are refused.")] = (
        None
    )
    user: Annotated[str | None, described("A label; no effect.")] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout = None


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """Of length 1."""
    object: Literal["embedding"] = "embedding"


class EmbeddingsAnswer(msgspec.Struct):
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


_decoder = BodyDecoder(EmbeddingsRequest)


async def embeddings(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_embeddings, None)


async def prepare_embeddings(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    check_embeds(state)
    generation = vector_generation(
        await _prompts(state, request),
        pooling=pooling_of(state, request.pooling),
        answer_id=new_id("embd-"),
        deadline=deadline_of(request.timeout, state.config, received),
        asked_priority=priority_of(request.priority),
        cache_salt=salt_of(request.cache_salt),
    )
    return Work(
        state,
        generation,
        lambda job: EmbeddingsWriter(job, request.dimensions, request.encoding_format),
        headers=vector_headers(state),
    )


async def _prompts(state: FrontState, request: EmbeddingsRequest) -> list[Prompt]:
    texts, token_lists = texts_or_tokens(request.input, "input", MAX_INPUTS)
    if "" in texts:  # Also for a model whose first token would stand alone.
        message = f"Text {texts.index('')} of 'input' has no tokens; send at least one character."
        raise BadRequest(message, param="input")
    if texts:
        cut = bool(request.truncate)
        return await encoded_inputs(state, texts, "input", may_cut=cut, prompt_name=request.prompt_name)
    return [Prompt(token_ids, None) for token_ids in token_lists]


class EmbeddingsWriter(VectorWriter):
    def __init__(self, job: Job, dimensions: int | None, encoding_format: EncodingFormat | None) -> None:
        super().__init__("input", dimensions)
        self._model = job.state.answers_as
        self._is_base64 = encoding_format == "base64"

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        vectors = self.vectors(choices)
        written = [_as_base64(vector) if self._is_base64 else vector.tolist() for vector in vectors]
        data = [EmbeddingData(index, one) for index, one in enumerate(written)]
        counts = EmbeddingsUsage(usage.prompt_tokens, usage.prompt_tokens)
        return encode(EmbeddingsAnswer(self._model, data, counts))


def _as_base64(vector: Float32s) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
