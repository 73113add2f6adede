"""POST /v1/embed and /v2/embed: a vector for each text, in Cohere's form."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
import numpy as np
from aiohttp import web
from msgspec import UNSET, UnsetType, field

from millrace.errors import BadRequest
from millrace.link.vectors import Float32s
from millrace.serve.encode.fields import EncodeFields, EncodeMeta, meta_of
from millrace.serve.encode.token_texts import known_prompt
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.vectors import (
    MAX_INPUTS,
    VectorWriter,
    check_embeds,
    encoded_inputs,
    pooling_of,
    vector_headers,
)
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import described
from millrace.serve.state import FrontState

InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
_PROMPTS: dict[InputType, tuple[str, ...]] = {
    "search_document": ("document", "passage", "corpus"),
    "search_query": ("query",),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class EmbedRequest(EncodeFields, kw_only=True):
    """The body of POST /v1/embed and /v2/embed."""

    texts: Annotated[list[str], described(f"Up to {MAX_INPUTS} texts.", minItems=1, maxItems=MAX_INPUTS)]
    input_type: Annotated[
        InputType | None, described("Chooses the model's prompt of this name, if it has one, as `prompt_name` does.")
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None,
        described("`float` (default), `base64` of little-endian float32, or one bit per number: `binary`, `ubinary`."),
    ] = None
    output_dimension: Annotated[int | None, described("Keep the first dimensions, again of length 1.", minimum=1)] = (
        None
    )
    truncate: Annotated[
        Literal["NONE", "END"] | None,
        described("`END` cuts the ends of texts that are too long; without it, and with `NONE`, they are refused."),
    ] = None


class EmbeddingsByType(msgspec.Struct):
    float_: list[list[float]] | UnsetType = field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class EmbedAnswer(msgspec.Struct):
    id: str
    texts: list[str]
    embeddings: EmbeddingsByType | list[list[float]]
    """By type; of /v1/embed without `embedding_types`, a list of vectors."""
    meta: EncodeMeta
    response_type: Literal["embeddings_by_type", "embeddings_floats"] = "embeddings_by_type"


_decoder = BodyDecoder(EmbedRequest)


async def embed(request: web.Request) -> web.StreamResponse:
    prepare = prepare_first if request.path.startswith("/v1/") else prepare_embed
    return await respond(request, prepare, None)


async def prepare_embed(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    return await _prepare(state, _decoder.decode(body), received, is_first=False)


async def prepare_first(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    """Of version 1, which gives a plain list unless types are asked for."""
    request = _decoder.decode(body)
    return await _prepare(state, request, received, is_first=request.embedding_types is None)


async def _prepare(state: FrontState, request: EmbedRequest, received: float, *, is_first: bool) -> Work:
    texts = request.texts
    if not texts or "" in texts:
        raise BadRequest("'texts' is empty or holds an empty text; send at least one character.", param="texts")
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    check_embeds(state)
    known = {} if state.encoder is None else state.encoder.prompts.by_name
    name = None if request.input_type is None else known_prompt(known, *_PROMPTS[request.input_type])
    prompts = await encoded_inputs(state, texts, "texts", may_cut=request.truncate == "END", prompt_name=name)
    generation = request.generation(state, prompts, pooling_of(state), "embd-", received)
    headers = vector_headers(state)
    return Work(state, generation, lambda job: EmbedWriter(job, request, is_first=is_first), headers=headers)


class EmbedWriter(VectorWriter):
    def __init__(self, job: Job, request: EmbedRequest, *, is_first: bool) -> None:
        super().__init__("texts", request.output_dimension)
        self._id = job.generation.answer_id
        self._request = request
        self._is_first = is_first

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        vectors, meta = self.vectors(choices), meta_of(usage.prompt_tokens, "1" if self._is_first else "2")
        if self._is_first:
            floats = [vector.tolist() for vector in vectors]
            return encode(EmbedAnswer(self._id, self._request.texts, floats, meta, "embeddings_floats"))
        by_type = _by_type(vectors, self._request.embedding_types or ["float"])
        return encode(EmbedAnswer(self._id, self._request.texts, by_type, meta))


def _by_type(vectors: list[Float32s], types: list[EmbeddingType]) -> EmbeddingsByType:
    found = EmbeddingsByType()
    if "float" in types:
        found.float_ = [vector.tolist() for vector in vectors]
    if "base64" in types:
        found.base64 = [base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") for vector in vectors]
    packed = [np.packbits(vector > 0).astype(np.int16) for vector in vectors]
    if "ubinary" in types:
        found.ubinary = [bits.tolist() for bits in packed]
    if "binary" in types:
        found.binary = [(bits - 128).tolist() for bits in packed]
    return found
