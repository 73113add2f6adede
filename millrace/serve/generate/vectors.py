"""Requests whose answers are vectors, in any dialect: one for each input."""

from __future__ import annotations

import numpy as np

from millrace.errors import MillraceError, RequestFailed
from millrace.link.vectors import Float32s, shortened
from millrace.params import Pooling, SamplingParams
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Usage
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.writer import TextOnly

MAX_INPUTS = 2048
"""In one request, as in OpenAI's API."""


def vector_generation(
    prompts: list[Prompt],
    *,
    pooling: Pooling,
    answer_id: str,
    deadline: float,
    priority: int = 1,
    cache_salt: str = "",
) -> Generation:
    return Generation(
        prompts=prompts,
        params=SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling),
        answer_id=answer_id,
        deadline=deadline,
        priority=priority,
        cache_salt=cache_salt,
        score_only=True,
    )


class VectorWriter(TextOnly):
    """Base of the dialects' writers. Vectors are never streamed."""

    limit_names: dict[str, str]

    def __init__(self, dimensions: int | None) -> None:
        self.limit_names = {"prompt": "input"}
        self._dimensions = dimensions

    def vectors(self, choices: list[CollectedChoice]) -> list[Float32s]:
        found = [b"" if choice.finish is None else choice.finish.vector for choice in choices]
        if not all(found):
            raise RequestFailed("The engine gave no vector for an input.")
        return [shortened(np.frombuffer(vector, np.float32), self._dimensions) for vector in found]

    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        raise NotImplementedError

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
