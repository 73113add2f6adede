"""POST /v1/classify and /classify: the class of each text, or of each token of a text."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from millrace.errors import BadRequest
from millrace.link.vectors import Float32s
from millrace.serve.encode.fields import EncodeRequest, EncodeUsage
from millrace.serve.encode.pairs import activated
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.events import Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.respond import respond
from millrace.serve.generate.vectors import MAX_INPUTS, VectorWriter, encoded_inputs
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.json_answer import encode
from millrace.serve.http.schema import described
from millrace.serve.state import FrontState
from millrace.sources.encoders.encoder_files import EncoderFiles


class ClassifyRequest(EncodeRequest, kw_only=True):
    """The body of POST /v1/classify and /classify."""

    input: Annotated[
        str | list[str], described(f"A text or up to {MAX_INPUTS}.", minLength=1, minItems=1, maxItems=MAX_INPUTS)
    ]


class TokenClass(msgspec.Struct):
    token_id: int
    token: str
    label: str
    score: float


class ClassifyData(msgspec.Struct):
    index: int
    num_classes: int
    label: str | UnsetType = UNSET
    """The likeliest. Left out by models that classify tokens."""
    probs: list[float] | UnsetType = UNSET
    """Of each class, in the model's order."""
    tokens: list[TokenClass] | UnsetType = UNSET
    """Of models that classify tokens: all tokens of the text, special ones included."""


class ClassifyAnswer(msgspec.Struct):
    id: str
    model: str
    created: int
    labels: list[str]
    """Names of the classes, in the order of `probs`."""
    data: list[ClassifyData]
    usage: EncodeUsage
    object: Literal["list"] = "list"


_decoder = BodyDecoder(ClassifyRequest)


async def classify(request: web.Request) -> web.StreamResponse:
    return await respond(request, prepare_classify, None)


async def prepare_classify(state: FrontState, body: bytes, received: float, owner: str) -> Work:
    request = _decoder.decode(body)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts or "" in texts:
        raise BadRequest("'input' is empty or holds an empty text; send at least one character.", param="input")
    state = await state.for_model(request.model)
    await state.await_engine(request.model)
    encoder = _classifier(state)
    prompts = await encoded_inputs(state, texts, "input", may_cut=bool(request.truncate))
    generation = request.generation(state, prompts, "model", "classify-", received)
    return Work(state, generation, lambda job: ClassifyWriter(job, encoder))


def _classifier(state: FrontState) -> EncoderFiles:
    encoder = state.encoder
    if encoder is None or encoder.task == "embed":
        what = "writes text" if encoder is None else "gives embeddings"
        raise BadRequest(
            f"The model {state.model_name!r} {what}; it was not trained to classify. Serve a classifier beside it.",
            param="model",
            code="unsupported_model",
        )
    return encoder


class ClassifyWriter(VectorWriter):
    def __init__(self, job: Job, encoder: EncoderFiles) -> None:
        super().__init__("input")
        self._job = job
        self._encoder = encoder

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        generation, num_tokens = self._job.generation, usage.prompt_tokens
        data = [
            self._data(index, vector, choice.prompt.token_ids)
            for index, (vector, choice) in enumerate(zip(self.vectors(choices), choices, strict=True))
        ]
        return encode(
            ClassifyAnswer(
                generation.answer_id,
                self._job.state.model_name,
                generation.created,
                list(self._encoder.labels),
                data,
                EncodeUsage(num_tokens, num_tokens),
            )
        )

    def _data(self, index: int, logits: Float32s, token_ids: list[int]) -> ClassifyData:
        labels = self._encoder.labels
        scores = activated(logits.reshape(-1, len(labels)), self._encoder.activation)
        best = scores.argmax(axis=-1).tolist()
        if self._encoder.task == "classify":
            return ClassifyData(index, len(labels), label=labels[best[0]], probs=scores[0].tolist())
        text_of = self._job.state.tokenizer.token_text
        tokens = [
            TokenClass(token_id, text_of(token_id), labels[label], float(own[label]))
            for token_id, label, own in zip(token_ids, best, scores, strict=True)
        ]
        return ClassifyData(index, len(labels), tokens=tokens)
