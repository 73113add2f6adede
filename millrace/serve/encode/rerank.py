"""POST /v1/rerank, /v2/rerank and /rerank: documents in the order of their relevance to a query.

The request is Cohere's and Jina's; the answer has the fields of both.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest
from millrace.serve.encode.fields import EncodeMeta, EncodeRequest, EncodeUsage, meta_of
from millrace.serve.encode.pairs import PairScores, Texts, score_pairs
from millrace.serve.generate.checks import check_range
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.vectors import MAX_INPUTS, VectorWriter
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import Strict, described
from millrace.serve.state import FrontState


class TextDocument(Strict):
    text: str


class RerankRequest(EncodeRequest, kw_only=True):
    """The body of POST /v1/rerank, /v2/rerank and /rerank."""

    query: Annotated[str, described("What the documents are compared with.", minLength=1)]
    documents: Annotated[
        list[str | TextDocument], described(f"Up to {MAX_INPUTS} texts.", minItems=1, maxItems=MAX_INPUTS)
    ]
    top_n: Annotated[int | None, described("How many of the documents to return; all by default.", minimum=1)] = None
    return_documents: Annotated[bool | None, described("Return the texts too.")] = None
    max_tokens_per_doc: Annotated[
        int | None, described("Keep so many tokens of each document; else long ones are refused.", minimum=1)
    ] = None


class RerankResult(msgspec.Struct):
    index: int
    """Of the document in the request."""
    relevance_score: float
    """Of a cross-encoder, as its files say: mostly from 0 to 1. Of a model for embeddings: the cosine. Of a
    sparse one: the dot product. Of one with a vector per token: MaxSim."""
    document: TextDocument | UnsetType = UNSET


class RerankAnswer(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    """The best first."""
    usage: EncodeUsage
    meta: EncodeMeta


_decoder = BodyDecoder(RerankRequest)


async def rerank(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_rerank, None)


async def prepare_rerank(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    check_range("top_n", request.top_n, 1, 2**31 - 1)
    check_range("max_tokens_per_doc", request.max_tokens_per_doc, 1, 2**31 - 1)
    if not request.documents:
        raise BadRequest("'documents' is empty; send at least one.", param="documents")
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    scores = await score_pairs(
        state,
        Texts([request.query], "query"),
        Texts(documents, "documents"),
        may_cut=bool(request.truncate),
        max_second=request.max_tokens_per_doc,
    )
    generation = request.generation(state, scores.prompts, scores.pooling, "rerank-", received)
    shown = documents if request.return_documents else []
    return Work(state, generation, lambda job: RerankWriter(job, scores, request.top_n, shown))


class RerankWriter(VectorWriter):
    def __init__(self, job: Job, scores: PairScores, top_n: int | None, shown: list[str]) -> None:
        """`shown`: the documents to return; [] for none."""
        super().__init__("documents")
        self._model = job.state.model_name
        self._id = job.generation.answer_id
        self._scores = scores
        self._top_n = top_n
        self._shown = shown

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        scores = self._scores.scores(self.vectors(choices))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        results = [
            RerankResult(index, scores[index], TextDocument(self._shown[index]) if self._shown else UNSET)
            for index in order
        ]
        num_tokens = usage.prompt_tokens
        total = EncodeUsage(num_tokens, num_tokens)
        return encode(RerankAnswer(self._id, self._model, results, total, meta_of(num_tokens)))
