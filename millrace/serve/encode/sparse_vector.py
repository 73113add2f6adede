"""POST /v1/sparse-vector: weights of tokens of the vocabulary for each text (SPLADE)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest
from millrace.link.vectors import sparse_of
from millrace.serve.encode.fields import EncodeRequest, EncodeUsage
from millrace.serve.generate.checks import check_range
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.vectors import MAX_INPUTS, VectorWriter, check_task, encoded_inputs
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import described
from millrace.serve.state import FrontState


class SparseVectorRequest(EncodeRequest, kw_only=True):
    """The body of POST /v1/sparse-vector."""

    input: Annotated[
        str | list[str], described(f"A text or up to {MAX_INPUTS}.", minLength=1, minItems=1, maxItems=MAX_INPUTS)
    ]
    prompt_name: Annotated[
        str | None, described("Which of the model's own prompts goes before each text, such as `query`.")
    ] = None
    max_weights: Annotated[int | None, described("Keep so many of the largest weights; all by default.", minimum=1)] = (
        None
    )
    return_tokens: Annotated[bool | None, described("Return the tokens' texts too.")] = None


class SparseVectorData(msgspec.Struct):
    index: int
    indices: list[int]
    """Token ids, ascending; all others have the weight 0."""
    values: list[float]
    tokens: list[str] | UnsetType = UNSET
    object: Literal["sparse_embedding"] = "sparse_embedding"


class SparseVectorAnswer(msgspec.Struct):
    id: str
    model: str
    created: int
    data: list[SparseVectorData]
    usage: EncodeUsage
    object: Literal["list"] = "list"


_decoder = BodyDecoder(SparseVectorRequest)


async def sparse_vector(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_sparse_vector, None)


async def prepare_sparse_vector(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    check_range("max_weights", request.max_weights, 1, 2**31 - 1)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts or "" in texts:
        raise BadRequest("'input' is empty or holds an empty text; send at least one character.", param="input")
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    check_task(state, "sparse")
    prompts = await encoded_inputs(
        state, texts, "input", may_cut=bool(request.truncate), prompt_name=request.prompt_name
    )
    generation = request.generation(state, prompts, "model", "sparse-", received)
    return Work(state, generation, lambda job: SparseVectorWriter(job, request))


class SparseVectorWriter(VectorWriter):
    def __init__(self, job: Job, request: SparseVectorRequest) -> None:
        super().__init__("input")
        self._job = job
        self._request = request

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        job, num_tokens = self._job, usage.prompt_tokens
        text_of = job.state.tokenizer.token_text
        data = []
        for index, packed in enumerate(self.vectors(choices)):
            found = sparse_of(packed).largest(self._request.max_weights)
            ids = found.indices.tolist()
            tokens = [text_of(token_id) for token_id in ids] if self._request.return_tokens else UNSET
            data.append(SparseVectorData(index, ids, found.values.tolist(), tokens))
        counts, generation = EncodeUsage(num_tokens, num_tokens), job.generation
        return encode(SparseVectorAnswer(generation.answer_id, job.state.model_name, generation.created, data, counts))
