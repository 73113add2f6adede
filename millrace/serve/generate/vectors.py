"""Requests whose answers are vectors, in any dialect: one for each input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from millrace.errors import BadRequest, MillraceError, RequestFailed
from millrace.link.vectors import Float32s, shortened
from millrace.params.draws import Pooling
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Usage
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.prompts import encode_texts
from millrace.serve.generate.writer import TextOnly
from millrace.serve.http.ids import warnings
from millrace.serve.state import FrontState
from millrace.sources.encoders.encoder_files import EncoderTask

MAX_INPUTS = 2048
"""In one request, as in OpenAI's API."""
NOT_TRAINED = "This model was not trained for embeddings, so its vectors compare badly. Serve one that was."
NO_MODULES = (
    "This model has no module files (modules.json), so the mean of its states is given; it may have been trained"
    " otherwise."
)


async def encoded_inputs(
    state: FrontState, texts: list[str], field: str, *, may_cut: bool = False, prompt_name: str | None = None
) -> list[Prompt]:
    """The inputs as prompts; `may_cut` cuts the ends of those that are too long. `field` is named in errors.
    `prompt_name`: which of the model's prompts goes before each; None: its default."""
    check_num_inputs(texts, field)
    before = _prompt_text(state, prompt_name)
    encoded = await encode_inputs(state, [before + text for text in texts], field, may_cut=may_cut)
    pooled_from = _tokens_of_prompt(state, before)
    ready = state.require_engine()
    room = text_room(state) if is_encoder(state) else min(ready.max_context, ready.kv_tokens)
    prompts = []
    for number, token_ids in enumerate(encoded):
        if not token_ids:
            raise BadRequest(f"Text {number} of '{field}' has no tokens; send at least one character.", param=field)
        kept = token_ids if not may_cut or len(token_ids) <= room else _cut(state, token_ids, room)
        prompts.append(Prompt(kept, None, len(token_ids) - len(kept), pooled_from=pooled_from))
    return prompts


def check_num_inputs(texts: Sequence[object], field: str) -> None:
    if len(texts) > MAX_INPUTS:
        raise BadRequest(
            f"'{field}' holds {len(texts)} texts; at most {MAX_INPUTS} are allowed in one request. Split it.",
            param=field,
        )


async def encode_inputs(
    state: FrontState, texts: list[str], field: str, *, add_special: bool = True, may_cut: bool = False
) -> list[list[int]]:
    """Token ids of each text, in the letters that the model knows."""
    if state.encoder is not None and state.encoder.lower_case:
        texts = [text.lower() for text in texts]
    try:
        return await encode_texts(state, texts, add_special=add_special, may_cut=may_cut)
    except BadRequest as error:
        raise name_fields(error, {"prompt": field}) from None


def is_encoder(state: FrontState) -> bool:
    return state.encoder is not None and not state.encoder.is_decoder


def text_room(state: FrontState) -> int:
    """Tokens of the longest text that an encoder reads."""
    return state.require_engine().max_context


def _cut(state: FrontState, token_ids: list[int], room: int) -> list[int]:
    return state.tokenizer.cut(token_ids, room) if is_encoder(state) else token_ids[:room]


def _prompt_text(state: FrontState, name: str | None) -> str:
    known = {} if state.encoder is None else state.encoder.prompts.by_name
    if name is not None and name not in known:
        listed = f"it has {', '.join(map(repr, known))}" if known else "it has none"
        raise BadRequest(f"The model has no prompt {name!r}; {listed}.", param="prompt_name")
    return "" if state.encoder is None else state.encoder.prompts.text(name)


def _tokens_of_prompt(state: FrontState, prompt: str) -> int:
    """Tokens that pooling leaves out."""
    if not prompt or state.encoder is None or state.encoder.prompts.are_pooled or state.encoder.is_decoder:
        return 0
    return len(state.tokenizer.encode(prompt)) - len(state.tokenizer.suffix_ids)


def vector_headers(state: FrontState) -> dict[str, str]:
    """A warning if the model's vectors are those of a model for text."""
    if state.encoder is not None and not state.encoder.is_decoder and not state.encoder.has_modules:
        return warnings([NO_MODULES])
    is_trained = state.is_embedder or state.encoder is not None
    return warnings([] if is_trained else [NOT_TRAINED])


_GIVES: dict[EncoderTask, str] = {
    "embed": "gives one vector per text: POST /v1/embeddings",
    "sparse": "is sparse (SPLADE): it gives weights of tokens and no single vector. POST /v1/sparse-vector, or"
    " /v1/rerank and /v1/score",
    "multi": "gives a vector per token (ColBERT) and no single one. POST /v1/multi-vector, or /v1/rerank and /v1/score",
    "classify": "is a classifier and gives no embeddings. POST /v1/classify, or /v1/rerank and /v1/score for pairs",
    "tag": "is a classifier and gives no embeddings. POST /v1/classify",
}
"""What a model gives, and how to ask for it, by task."""


def check_embeds(state: FrontState) -> None:
    """Refuse embeddings of a model that gives something else."""
    if state.encoder is not None:
        check_task(state, "embed")


def check_task(state: FrontState, task: EncoderTask) -> None:
    """Refuse a request that the model was not trained for, with what it is and how to ask."""
    own = None if state.encoder is None else state.encoder.task
    if own != task:
        gives = "writes text and gives no such vectors. Serve a model that does" if own is None else _GIVES[own]
        raise BadRequest(f"The model {state.model_name!r} {gives}.", param="model", code="unsupported_model")


def pooling_of(state: FrontState, asked: Pooling | None = None) -> Pooling:
    """How states become a vector: as the model's files say, unless a decoder is asked for something else."""
    if is_encoder(state):
        if asked is not None:
            message = "'pooling' is set by the files of this model; leave it out."
            raise BadRequest(message, param="pooling", code="unsupported_parameter")
        return "model"
    if asked is not None:
        return asked
    return "mean" if state.encoder is not None and state.encoder.pooling == ("mean",) else "last"


def vector_generation(
    prompts: list[Prompt],
    *,
    pooling: Pooling,
    answer_id: str,
    deadline: float,
    asked_priority: int | None = None,
    cache_salt: str = "",
) -> Generation:
    return Generation(
        prompts=prompts,
        params=SamplingParams(temperature=0.0, max_tokens=0, pooling=pooling),
        answer_id=answer_id,
        deadline=deadline,
        asked_priority=asked_priority,
        cache_salt=cache_salt,
        score_only=True,
    )


class VectorWriter(TextOnly, ABC):
    """Base of the dialects' writers. Vectors are never streamed."""

    limit_names: dict[str, str]

    def __init__(self, field: str, dimensions: int | None = None) -> None:
        """`field`: the request's name of its inputs."""
        self.limit_names = {"prompt": field}
        self._dimensions = dimensions

    def vectors(self, choices: list[CollectedChoice]) -> list[Float32s]:
        found = [b"" if choice.finish is None else choice.finish.vector for choice in choices]
        if not all(found):
            raise RequestFailed("The engine gave no vector for an input.")
        return [shortened(np.frombuffer(vector, np.float32), self._dimensions) for vector in found]

    @abstractmethod
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes: ...

    def preamble(self, choices: list[Choice]) -> bytes:
        raise AssertionError("vectors are not streamed")

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        raise AssertionError("vectors are not streamed")

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        raise AssertionError("vectors are not streamed")

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        raise AssertionError("vectors are not streamed")

    def finish_frame(self, choice: Choice) -> bytes:
        raise AssertionError("vectors are not streamed")

    def end_frames(self, usage: Usage) -> bytes:
        raise AssertionError("vectors are not streamed")

    def error_frames(self, error: MillraceError) -> bytes:
        raise AssertionError("vectors are not streamed")
