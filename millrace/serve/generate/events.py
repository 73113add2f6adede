"""What a choice says, as structured events: the one step between generated text and a dialect's shape.

A choice turns its text into events; each dialect's writer gives an event its bytes. Text is the only kind of event
today. A new kind (a tool call, reasoning) is parsed out of the text once, in `choices`, gets a class here and a field
in `Output`, and one method in each writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millrace.link.messages import TokenLogprobs

AnswerFinish = Literal["stop", "length"]
"""Finish reason of an answer that did not fail."""


@dataclass(slots=True)
class TextDelta:
    """More of the answer's text, with the tokens that it was decoded from."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Output:
    """Everything that a choice has said so far."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def mean_logprob(self) -> float:
        """Per token; `best_of` ranks by it."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    def add(self, delta: TextDelta) -> None:
        self.parts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
