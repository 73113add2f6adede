"""OpenAI's messages translated into the internal `Conversation`."""

from __future__ import annotations

from typing import Any, cast

from millrace.errors import BadRequest
from millrace.serve.generate import messages as internal
from millrace.serve.generate.checks import refuse_unsupported
from millrace.serve.generate.messages import Conversation, Role
from millrace.serve.openai.schemas import (
    NOT_SUPPORTED_IN_MESSAGES,
    AssistantMessage,
    ContentPart,
    DeveloperMessage,
    FunctionMessage,
    Message,
    TextPart,
    ToolMessage,
)


def conversation_of(
    messages: list[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> Conversation:
    translated = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return Conversation(translated, bool(continue_final_message), add_generation_prompt, template_kwargs or {})


def _message(message: Message, at: str) -> internal.Message:
    role = str(message.__struct_config__.tag)
    if isinstance(message, (ToolMessage, FunctionMessage)):
        raise BadRequest(
            f"'{at}.role' is '{role}', which is not supported yet; remove the message.",
            param=f"{at}.role",
            code="unsupported_parameter",
        )
    if isinstance(message, AssistantMessage):
        refuse_unsupported(message, NOT_SUPPORTED_IN_MESSAGES, f"{at}.")
    content = message.content
    if content is None:
        raise BadRequest(f"'{at}.content' is null; send a text.", param=f"{at}.content")
    shown = cast(Role, "system" if isinstance(message, DeveloperMessage) else role)
    if isinstance(content, str):
        return internal.Message(shown, content, message.name)
    texts = [_text(part, f"{at}.content[{index}]") for index, part in enumerate(content)]
    return internal.Message(shown, texts, message.name)


def _text(part: ContentPart, at: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    raise BadRequest(
        f"'{at}' is of type '{part.__struct_config__.tag}', which is not supported yet; this server takes text only.",
        param=f"{at}.type",
        code="unsupported_parameter",
    )
