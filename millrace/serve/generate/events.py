"""What a choice says, as structured events: the one step between generated text and a dialect's shape.

A choice turns its text into events; each dialect's writer gives an event its bytes. Text is `TextDelta`. Reasoning and
tool calls are found by `text.answer_parser`, in `choices`; their events are in `text.answer_events`, and each has a
method in the writers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millrace.link.messages import TokenLogprobs
from millrace.text.answer_events import AnswerEvent, CallStart, ReasoningSaid, TextSaid, ToolCall

AnswerFinish = Literal["stop", "length", "tool_calls"]
"""Finish reason of an answer that did not fail."""


@dataclass(slots=True)
class Tokens:
    """The tokens that an event was decoded from."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class TextDelta:
    """More of the answer's text, with the tokens that it was decoded from."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class SaidText:
    """A stretch of text, or of reasoning."""

    parts: list[str]
    is_reasoning: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens that it was decoded from."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Output:
    """Everything that a choice has said so far."""

    parts: list[str] = field(default_factory=list)
    """The text of an answer that is not parsed."""
    said: list[SaidText | ToolCall] = field(default_factory=list)
    """Text, reasoning and calls in their order, of an answer that is parsed."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _num_assigned: int = 0
    """Log-probabilities whose tokens belong to an event so far."""

    @property
    def text(self) -> str:
        return "".join(self.parts) + self._joined(is_reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._joined(is_reasoning=True)

    def _joined(self, *, is_reasoning: bool) -> str:
        return "".join(one.text for one in self.said if isinstance(one, SaidText) and one.is_reasoning == is_reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        return [one for one in self.said if isinstance(one, ToolCall)]

    @property
    def items(self) -> list[SaidText | ToolCall]:
        """The parts in their order, also of an answer that is not parsed."""
        return [SaidText(self.parts, logprobs=self.logprobs), *self.said] if any(self.parts) else self.said

    @property
    def mean_logprob(self) -> float:
        """Per token; `best_of` ranks by it."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    def add(self, event: AnswerEvent) -> None:
        """Calls collect their arguments themselves. An event belongs to the tokens since the event before it."""
        logprobs, self._num_assigned = self.logprobs[self._num_assigned :], len(self.logprobs)
        if isinstance(event, CallStart):
            self.said.append(event.call)
        elif isinstance(event, (TextSaid, ReasoningSaid)) and event.text:
            is_reasoning = isinstance(event, ReasoningSaid)
            last = self.said[-1] if self.said else None
            if isinstance(last, SaidText) and last.is_reasoning == is_reasoning:
                last.parts.append(event.text)
                last.logprobs += logprobs
            else:
                self.said.append(SaidText([event.text], is_reasoning, logprobs))


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request: those of all choices together; a prompt counts once, however many choices it has. Each
    dialect reports them under its own names."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the prefix cache."""
    output_tokens: int
    reasoning_tokens: int = 0
    """Output tokens of the reasoning; `output_tokens` includes them."""
    predicted_tokens: int = 0
    """Tokens of the request's prediction that were tried as drafts."""
    predicted_accepted: int = 0
    """Those of them that became output."""
    created_tokens: int = 0
    """Prompt tokens that were computed and that a handle keeps cached."""
    document_tokens: int | None = None
    """Prompt tokens whose KV was that of a document at another place; None if no part was marked."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens
