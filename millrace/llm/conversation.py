"""Conversations of Python programs, with the checks of POST /v1/chat/completions, as prompts for the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from millrace.errors import BadRequest
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.open_chat import Chat, open_prompt
from millrace.serve.generate.chat.tools import ToolUse
from millrace.serve.generate.generation import Prompt as TokenPrompt
from millrace.serve.generate.messages import Conversation
from millrace.serve.generate.prompts import template_input, with_reasoning
from millrace.serve.http.body import BodyDecoder
from millrace.serve.openai.schemas import ChatRequest
from millrace.serve.openai.translate_messages import conversation_of
from millrace.serve.openai.translate_tools import tools_of
from millrace.text.answer_formats import AnswerFormats
from millrace.text.chat.template import ChatTemplate
from millrace.text.document_spans import encode_with_documents
from millrace.text.tokenizers.tokenizer import Tokenizer

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation as OpenAI writes it; a string is one user message."""
ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]
"""As OpenAI writes it; a mapping names the function that must be called."""


_REQUESTS = BodyDecoder(ChatRequest)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What rendering a conversation and reading its answer need of a model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    formats: AnswerFormats


def as_messages(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        raise BadRequest("The messages are one dictionary; give a list: [{'role': 'user', 'content': '…'}].")
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise BadRequest(
            f"The messages are of type {type(messages).__name__}; give a text or a list of messages:"
            " [{'role': 'user', 'content': '…'}]."
        )
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(
                f"messages[{index}] is of type {type(message).__name__}; give {{'role': 'user', 'content': '…'}}."
            )
        found.append(dict(message))
    return found


def read_conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice | None,
    template_kwargs: Mapping[str, Any] | None,
) -> tuple[Conversation, ToolUse]:
    """Checked like a request over HTTP."""
    body: dict[str, Any] = {"messages": messages, "tools": tools or None, "tool_choice": tool_choice}
    try:
        encoded = msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"The messages or tools hold what is not JSON: {error}.") from error
    request = _REQUESTS.decode(encoded)
    # Variables of the template may be any Python values.
    conversation = conversation_of(request.messages, None, None, dict(template_kwargs or {}))
    use = tools_of(request)
    return dataclasses.replace(conversation, tools=use.shown), use


def open_conversation(model: ChatModel, conversation: Conversation, use: ToolUse, params: SamplingParams) -> Chat:
    """The prompt, the parameters with the grammar of calls, and what to look for in the answer."""
    conversation.check()
    shown, tools = template_input(model, conversation)
    text = model.template.render(
        shown,
        add_generation_prompt=conversation.opens_answer,
        continue_final_message=conversation.continue_final_message,
        tools=tools,
        **conversation.template_kwargs,
    )
    if conversation.documents:
        token_ids, documents = encode_with_documents(model.tokenizer, text, conversation.documents)
        prompt = TokenPrompt(token_ids, None, documents=documents)
    else:
        prompt = TokenPrompt(model.tokenizer.encode(text, add_special=False), None)
    return open_prompt(model, with_reasoning(model, prompt, text), params, use=use, grammar_field="schema")
