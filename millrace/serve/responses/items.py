"""Items as internal messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from millrace.serve.generate.chat.tools import arguments_of
from millrace.serve.generate.messages import Message, PastCall, Role
from millrace.serve.responses.schemas_items import (
    FunctionCallItem,
    FunctionResultItem,
    InputItem,
    InputText,
    OutputItem,
    ReasoningItem,
)
from millrace.serve.responses.schemas_tools import joined_name


def messages_of(items: Sequence[InputItem | OutputItem]) -> list[Message]:
    """Reasoning, text and calls of one answer become one assistant message; the role `developer` becomes `system`."""
    messages: list[Message] = []
    reasoning: str | None = None
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning = "\n".join(part.text for part in item.content or item.summary) or None
            continue
        if isinstance(item, FunctionResultItem):
            messages.append(Message("tool", item.output, tool_call_id=item.call_id))
        elif isinstance(item, FunctionCallItem):
            _add_call(messages, item, reasoning)
        else:
            texts = [part.text for part in item.content]
            content = texts[0] if len(texts) == 1 else texts
            role: Role = "system" if item.role == "developer" else item.role
            inputs = [part for part in item.content if isinstance(part, InputText)]
            documents = tuple(part.cache.marked(part.text) for part in inputs if part.cache is not None)
            thought = reasoning if role == "assistant" else None
            messages.append(Message(role, content, reasoning=thought, documents=documents))
        reasoning = None
    return messages


def _add_call(messages: list[Message], item: FunctionCallItem, reasoning: str | None) -> None:
    call = PastCall(item.call_id, joined_name(item.namespace or "", item.name), arguments_of(item.arguments))
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and reasoning is None:
        messages[-1] = dataclasses.replace(last, tool_calls=(*last.tool_calls, call))
    else:
        messages.append(Message("assistant", "", tool_calls=(call,), reasoning=reasoning))
