"""A conversation in the one internal form that every dialect's messages are translated into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import BadRequest
from millrace.text.document_spans import MarkedText, check_documents
from millrace.text.tools.formats import Function

MAX_MESSAGES = 16_384
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "documents")
"""Variables that the server itself gives to a chat template."""

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call of an earlier answer."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """The object, or the text that the model wrote instead of one."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str | list[str]
    """A text, or several text parts; the template decides how parts are joined."""
    name: str | None = None
    """Of a tool message: the function that was called."""
    tool_calls: tuple[PastCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool message: the call that it answers."""
    reasoning: str | None = None
    documents: tuple[MarkedText, ...] = ()
    """Those of its texts that may be reused wherever they stand."""

    @property
    def texts(self) -> list[str]:
        return [self.content] if isinstance(self.content, str) else self.content

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content
        plain: dict[str, Any] = {
            "role": self.role,
            "content": content if isinstance(content, str) else [{"type": "text", "text": text} for text in content],
        }
        if self.name is not None:
            plain["name"] = self.name
        if self.reasoning is not None:
            plain["reasoning_content"] = self.reasoning
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return plain


@dataclass(frozen=True, slots=True)
class KnownText:
    """The beginning of a conversation as it was computed before: the tokens that the model drew may be others than its
    text is encoded as."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and how the template renders them."""

    messages: list[Message]
    continue_final_message: bool = False
    """Continue the last message instead of answering it."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the answer; None: unless the last message is continued."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Function, ...] = ()
    known: KnownText | None = None
    """Of a session: what the prompt's text is likely to begin with."""

    @property
    def opens_answer(self) -> bool:
        add = self.add_generation_prompt
        return not self.continue_final_message if add is None else add

    @property
    def documents(self) -> list[MarkedText]:
        return [document for message in self.messages for document in message.documents]

    def check(self) -> None:
        """Checks that all dialects share; `messages` is the field's internal name."""
        if not self.messages:
            raise BadRequest("'messages' is empty; send at least one message.", param="messages")
        if len(self.messages) > MAX_MESSAGES:
            raise BadRequest(
                f"'messages' holds {len(self.messages)} messages; at most {MAX_MESSAGES} are allowed.", param="messages"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "'add_generation_prompt' and 'continue_final_message' are both true, but an answer either begins or"
                " continues; set one of them to false.",
                param="continue_final_message",
            )
        check_documents(self.documents)
        for name in self.template_kwargs:
            if name in RESERVED or not name.isidentifier():
                raise BadRequest(
                    f"chat_template_kwargs sets {name[:80]!r}, which is reserved or not a name; remove it.",
                    param="chat_template_kwargs",
                )
