"""OpenAI's messages translated into the internal `Conversation`."""

from __future__ import annotations

from typing import Any, cast

from millrace.errors import BadRequest
from millrace.serve.generate import messages as internal
from millrace.serve.generate.chat.tools import arguments_of
from millrace.serve.generate.checks import refuse_unsupported
from millrace.serve.generate.messages import Conversation, PastCall, Role
from millrace.serve.openai.schemas import (
    NOT_SUPPORTED_IN_MESSAGES,
    AssistantMessage,
    Content,
    ContentPart,
    Message,
    RefusalPart,
    TextPart,
    ToolMessage,
)
from millrace.serve.openai.schemas_tools import CalledFunction
from millrace.text.document_spans import MarkedText


def conversation_of(
    messages: list[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> Conversation:
    translated = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return Conversation(translated, bool(continue_final_message), add_generation_prompt, template_kwargs or {})


def _message(message: Message, at: str) -> internal.Message:
    if isinstance(message, AssistantMessage):
        return _assistant(message, at)
    content = message.content
    if content is None:
        raise BadRequest(f"'{at}.content' is null; send a text.", param=f"{at}.content")
    role = str(message.__struct_config__.tag)
    role = {"developer": "system", "function": "tool"}.get(role, role)
    call_id = message.tool_call_id if isinstance(message, ToolMessage) else None
    texts, documents = _content(content, at), _documents(content)
    return internal.Message(cast(Role, role), texts, message.name, tool_call_id=call_id, documents=documents)


def _assistant(message: AssistantMessage, at: str) -> internal.Message:
    refuse_unsupported(message, NOT_SUPPORTED_IN_MESSAGES, f"{at}.")
    calls = tuple(PastCall(call.id, *_called(call.function)) for call in message.tool_calls or ())
    if message.function_call is not None:
        calls += (PastCall("", *_called(message.function_call)),)
    said = message.content if message.content is not None else message.refusal
    if said is None and not calls:
        raise BadRequest(f"'{at}.content' is null; send a text.", param=f"{at}.content")
    content = "" if said is None else _content(said, at)
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    documents = () if said is None else _documents(said)
    return internal.Message("assistant", content, message.name, calls, reasoning=reasoning, documents=documents)


def _called(function: CalledFunction) -> tuple[str, dict[str, Any] | str]:
    arguments = function.arguments
    return function.name, arguments if isinstance(arguments, dict) else arguments_of(arguments)


def _documents(content: Content) -> tuple[MarkedText, ...]:
    parts = () if isinstance(content, str) else content
    marked = [(part.text, part.cache) for part in parts if isinstance(part, TextPart)]
    return tuple(cache.marked(text) for text, cache in marked if cache is not None)


def _content(content: Content, at: str) -> str | list[str]:
    if isinstance(content, str):
        return content
    return [_text(part, f"{at}.content[{index}]") for index, part in enumerate(content)]


def _text(part: ContentPart, at: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, RefusalPart):
        return part.refusal
    raise BadRequest(
        f"'{at}' is of type '{part.__struct_config__.tag}', which is not supported yet; this server takes text only.",
        param=f"{at}.type",
        code="unsupported_parameter",
    )
