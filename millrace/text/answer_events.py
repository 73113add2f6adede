"""What an answer consists of: text, reasoning and tool calls, as events in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ToolCall:
    """One call of a tool. `arguments` grows while the call is written."""

    name: str
    parts: list[str] = field(default_factory=list)
    """The arguments so far: pieces of one JSON object."""
    is_complete: bool = False
    """False: still being written, cut by a token limit, or broken by text that is not JSON."""
    id: str = ""
    index: int = 0

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class TextSaid:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSaid:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallArguments:
    call: ToolCall
    text: str
    """More of the arguments' JSON."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    call: ToolCall


AnswerEvent = TextSaid | ReasoningSaid | CallStart | CallArguments | CallEnd
