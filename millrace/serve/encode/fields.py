"""What the requests and answers of this room share."""

from __future__ import annotations

from typing import Annotated

import msgspec

from millrace.params import Pooling
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.priority import PriorityClass, priority_of
from millrace.serve.generate.sampling import deadline_of
from millrace.serve.generate.vectors import vector_generation
from millrace.serve.http.ids import new_id
from millrace.serve.http.schema import Strict, described
from millrace.serve.state import FrontState


class EncodeRequest(Strict, kw_only=True):
    model: str | None = None
    truncate: Annotated[
        bool | None, described("Cut the ends of texts that are too long; without it they are refused.")
    ] = None
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


class EncodeUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
