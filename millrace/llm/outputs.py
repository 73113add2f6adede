"""What `LLM` returns: generations with their choices, and the parts of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from millrace.errors import RequestFailed
from millrace.link.messages import TokenLogprobs
from millrace.text.grammar.python_types import parse_as

MAX_REPR_CHARS = 60

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Parsed = TypeVar("Parsed", default=Any)
    """Type of the objects that answers are parsed to: the `schema` that was asked for."""
else:
    from typing import TypeVar

    Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool that an answer asks for."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """The arguments by name; the text that the model wrote if it is no object."""
    is_complete: bool = True
    """False if the token limit cut the call off."""


@dataclass(slots=True, repr=False)
class Choice(Generic[Parsed]):
    """One answer. `finish_reason` is "stop", "length" or "tool_calls"; `stopped_by` is the stop string or end token id,
    if any."""

    index: int
    text: str = ""
    """Without reasoning and tool calls, if it answers a conversation."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    """What the model wrote before its answer to a conversation, if it reasons."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    schema: object = None
    """What the answer conforms to, as it was asked for."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def parsed(self) -> Parsed | None:
        """The answer as an object of the type that `schema` gave, or as plain values if it was a dictionary. None
        without a schema, and of an answer that calls tools. Raises `RequestFailed` if the answer was cut."""
        if self.schema is None or self.tool_calls:
            return None
        try:
            found: Parsed = parse_as(self.schema, self.text)
        except ValueError as error:
            why = "max_tokens ended it; allow more" if self.finish_reason == "length" else f"{error}".split("\n")[0]
            raise RequestFailed(f"The answer cannot be parsed: {why}. It is {_shortened(self.text)}.") from error
        return found

    def __repr__(self) -> str:
        more = f", tool_calls={self.tool_calls!r}" if self.tool_calls else ""
        return (
            f"Choice(index={self.index}, text={_shortened(self.text)}, num_tokens={self.num_tokens},"
            f" finish_reason={self.finish_reason!r}, stopped_by={self.stopped_by!r}{more})"
        )


@dataclass(slots=True, repr=False)
class Generation(Generic[Parsed]):
    """All answers to one prompt. Its own properties are those of the first."""

    prompt_token_ids: list[int]
    choices: list[Choice[Parsed]]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    document_tokens: int = 0
    """Prompt tokens whose KV was that of a document at another place: if there are any, the answer is approximate."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of `chat`: the conversation with the first answer, and with the tools' results; the next call may continue it."""

    def __repr__(self) -> str:
        return (
            f"Generation(num_prompt_tokens={self.num_prompt_tokens}, cached_tokens={self.cached_tokens},"
            f" choices={self.choices!r})"
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def num_tokens(self) -> int:
        return self.choices[0].num_tokens

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.choices[0].tool_calls

    @property
    def parsed(self) -> Parsed | None:
        return self.choices[0].parsed


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One token of a stream and the text it added, which is empty while text is held back for a stop string or an
    incomplete character. The last part of a choice has no token and carries the finished choice."""

    index: int
    text: str
    token_id: int | None = None
    choice: Choice[Any] | None = None
    reasoning: str = ""
    """Text of the model's reasoning, in the answer to a conversation."""


def answer_message(choice: Choice[Any]) -> dict[str, Any]:
    """The answer as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
                },
            }
            for call in choice.tool_calls
        ]
    return message


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MAX_REPR_CHARS else text[: MAX_REPR_CHARS - 1] + "…")
