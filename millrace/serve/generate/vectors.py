"""Requests whose answers are vectors, in any dialect: one for each input."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from millrace.errors import BadRequest, MillraceError, RequestFailed
from millrace.link.vectors import Float32s, shortened
from millrace.params import Pooling, SamplingParams
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Usage
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.prompts import encode_texts
from millrace.serve.generate.writer import TextOnly
from millrace.serve.http.ids import warnings
from millrace.serve.state import FrontState

MAX_INPUTS = 2048
"""In one request, as in OpenAI's API."""
NOT_TRAINED = "This model was not trained for embeddings, so its vectors compare badly. Serve one that was."


async def encoded_inputs(state: FrontState, texts: list[str], field: str, *, may_cut: bool = False) -> list[Prompt]:
    """The inputs as prompts; `may_cut` cuts the ends of those that are too long. `field` is named in errors."""
    if len(texts) > MAX_INPUTS:
        raise BadRequest(
            f"'{field}' holds {len(texts)} texts; at most {MAX_INPUTS} are allowed in one request. Split it.",
            param=field,
        )
    try:
        encoded = await encode_texts(state, texts, add_special=True, may_cut=may_cut)
    except BadRequest as error:
        raise name_fields(error, {"prompt": field}) from None
    ready = state.require_engine()
    room = min(ready.max_context, ready.kv_tokens) if may_cut else None
    prompts = [Prompt(token_ids[:room], None, len(token_ids) - len(token_ids[:room])) for token_ids in encoded]
    for number, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise BadRequest(f"Text {number} of '{field}' has no tokens; send at least one character.", param=field)
    return prompts


def vector_headers(state: FrontState) -> dict[str, str]:
    """A warning if the model's vectors are those of a model for text."""
    return warnings([] if state.is_embedder else [NOT_TRAINED])


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
