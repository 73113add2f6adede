"""POST /v1/multi-vector: a vector for each token of each text, in Jina's form."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from millrace.errors import BadRequest
from millrace.link.vectors import Float32s
from millrace.serve.encode.fields import EncodeRequest, EncodeUsage
from millrace.serve.encode.token_texts import TokenTexts, role_inputs
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.vectors import MAX_INPUTS, VectorWriter, check_task
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import described
from millrace.serve.state import FrontState
from millrace.sources.encoders.retrieval_files import MultiForm, Role


class MultiVectorRequest(EncodeRequest, kw_only=True):
    """The body of POST /v1/multi-vector."""

    input: Annotated[
        str | list[str], described(f"A text or up to {MAX_INPUTS}.", minLength=1, minItems=1, maxItems=MAX_INPUTS)
    ]
    input_type: Annotated[
        Role | None, described("`document` (default) or `query`: models mark and fill them differently.")
    ] = None
    embedding_type: Annotated[
        Literal["float", "base64"] | None, described("`float` (default), or each vector in `base64`: float32.")
    ] = None


class MultiVectorData(msgspec.Struct):
    index: int
    embeddings: list[list[float] | str]
    """A vector for each token that counts, as numbers or in base64; compare texts by MaxSim."""
    object: Literal["embeddings"] = "embeddings"


class MultiVectorAnswer(msgspec.Struct):
    id: str
    model: str
    created: int
    data: list[MultiVectorData]
    usage: EncodeUsage
    object: Literal["list"] = "list"


_decoder = BodyDecoder(MultiVectorRequest)


async def multi_vector(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_multi_vector, None)


async def prepare_multi_vector(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts or "" in texts:
        raise BadRequest("'input' is empty or holds an empty text; send at least one character.", param="input")
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    check_task(state, "multi")
    assert state.encoder is not None
    assert state.encoder.multi is not None
    form, role = state.encoder.multi, request.input_type or "document"
    prompts = await role_inputs(state, form, texts, "input", role, may_cut=bool(request.truncate))
    generation = request.generation(state, prompts, "model", "multi-", received)
    return Work(state, generation, lambda job: MultiVectorWriter(job, form, role, request.embedding_type == "base64"))


class MultiVectorWriter(VectorWriter):
    def __init__(self, job: Job, form: MultiForm, role: Role, is_base64: bool) -> None:
        super().__init__("input")
        self._job = job
        self._role = role
        self._is_base64 = is_base64
        self._texts = TokenTexts(form, job.state.tokenizer)

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        job, num_tokens = self._job, usage.prompt_tokens
        data = []
        for index, (packed, choice) in enumerate(zip(self.vectors(choices), choices, strict=True)):
            kept = self._texts.kept(packed, choice.prompt.token_ids, self._role)
            data.append(MultiVectorData(index, [_as_base64(row) if self._is_base64 else row.tolist() for row in kept]))
        counts, generation = EncodeUsage(num_tokens, num_tokens), job.generation
        return encode(MultiVectorAnswer(generation.answer_id, job.state.model_name, generation.created, data, counts))


def _as_base64(vector: Float32s) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
