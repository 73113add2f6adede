"""POST /v1/score and /score: a score for each pair of texts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web

from millrace.errors import BadRequest
from millrace.serve.encode.fields import EncodeRequest, EncodeUsage
from millrace.serve.encode.pairs import PairScores, Texts, score_pairs
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.vectors import MAX_INPUTS, VectorWriter
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import described
from millrace.serve.state import FrontState


class ScoreRequest(EncodeRequest, kw_only=True):
    """The body of POST /v1/score and /score."""

    text_1: Annotated[str | list[str], described("One text, or as many as in `text_2`.", minLength=1, minItems=1)]
    text_2: Annotated[
        str | list[str], described(f"Up to {MAX_INPUTS} texts.", minLength=1, minItems=1, maxItems=MAX_INPUTS)
    ]


class ScoreData(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(msgspec.Struct):
    id: str
    model: str
    created: int
    data: list[ScoreData]
    usage: EncodeUsage
    object: Literal["list"] = "list"


_decoder = BodyDecoder(ScoreRequest)


async def score(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_score, None)


async def prepare_score(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    first, second = (_texts(request.text_1, "text_1"), _texts(request.text_2, "text_2"))
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    scores = await score_pairs(state, first, second, may_cut=bool(request.truncate))
    generation = request.generation(state, scores.prompts, scores.pooling, "score-", received)
    return Work(state, generation, lambda job: ScoreWriter(job, scores))


def _texts(value: str | list[str], field: str) -> Texts:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise BadRequest(f"'{field}' is empty; send at least one text.", param=field)
    return Texts(texts, field)


class ScoreWriter(VectorWriter):
    def __init__(self, job: Job, scores: PairScores) -> None:
        super().__init__("text_2")
        self._job = job
        self._scores = scores

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        job, num_tokens = self._job, usage.prompt_tokens
        data = [ScoreData(index, one) for index, one in enumerate(self._scores.scores(self.vectors(choices)))]
        counts = EncodeUsage(num_tokens, num_tokens)
        generation = job.generation
        return encode(ScoreAnswer(generation.answer_id, job.state.model_name, generation.created, data, counts))
