"""What the requests and answers of this room share."""

from __future__ import annotations

from typing import Annotated

import msgspec

from millrace.params.draws import Pooling
from millrace.serve.generate.fields.priority import PriorityClass, priority_of
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.sampling import deadline_of
from millrace.serve.generate.vectors import vector_generation
from millrace.serve.http.ids import new_id
from millrace.serve.http.schema import Strict, described
from millrace.serve.state import FrontState


class EncodeFields(Strict, kw_only=True):
    model: str | None = None
    user: Annotated[str | None, described("A label; no effect.")] = None
    priority: Annotated[
        PriorityClass | int | None, described("Priority class: 0 interactive, 1 standard (default), 2 batch.")
    ] = None
    timeout: Annotated[float | None, described("Seconds until the deadline.", exclusiveMinimum=0)] = None

    def generation(
        self, state: FrontState, prompts: list[Prompt], pooling: Pooling, name: str, received: float
    ) -> Generation:
        """`name`: how the answer's id begins."""
        return vector_generation(
            prompts,
            pooling=pooling,
            answer_id=new_id(name),
            deadline=deadline_of(self.timeout, state.config, received),
            asked_priority=priority_of(self.priority),
        )


class EncodeRequest(EncodeFields, kw_only=True):
    truncate: Annotated[
        bool | None, described("Cut the ends of texts that are too long; without it they are refused.")
    ] = None


class EncodeUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class ApiVersion(msgspec.Struct):
    version: str


class EncodeTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int = 0


class EncodeMeta(msgspec.Struct):
    """Of answers in Cohere's form."""

    api_version: ApiVersion
    tokens: EncodeTokens
    billed_units: EncodeTokens
    """The same: nothing is billed here, but Cohere's clients read it."""


def meta_of(num_tokens: int, version: str = "2") -> EncodeMeta:
    tokens = EncodeTokens(num_tokens)
    return EncodeMeta(ApiVersion(version), tokens, tokens)
