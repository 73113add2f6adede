"""A conversation, its tools and its reasoning as a prompt, sampling parameters and the form of the answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from millrace.errors import BadRequest
from millrace.params import SamplingParams
from millrace.serve.generate.chat.tools import NO_TOOLS, ToolUse
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.messages import Conversation
from millrace.serve.generate.prompts import chat_prompt
from millrace.serve.state import FrontState
from millrace.text.answer_parser import AnswerForm


@dataclass(frozen=True, slots=True)
class Chat:
    prompt: Prompt
    params: SamplingParams
    form: AnswerForm | None
    """None: everything in the answer is text."""
    grammar_field: str
    """The request's field that set the grammar."""


async def open_chat(
    state: FrontState,
    conversation: Conversation,
    params: SamplingParams,
    *,
    use: ToolUse = NO_TOOLS,
    keep: int | None = None,
    grammar_field: str = "response_format",
) -> Chat:
    """`grammar_field` is the field that set the grammar, for errors."""
    if use.choice == "required":
        raise BadRequest(
            "'tool_choice' requires a call, which is not supported yet; leave the choice to the model ('auto').",
            param="tool_choice",
            code="unsupported_parameter",
        )
    conversation = dataclasses.replace(conversation, tools=use.shown)
    prompt = await chat_prompt(state, conversation, max_tokens=params.max_tokens, keep=keep)
    return Chat(prompt, params, _form(state, use, prompt), grammar_field)


def _form(state: FrontState, use: ToolUse, prompt: Prompt) -> AnswerForm | None:
    formats = state.formats
    if not use.shown and formats.reasoning is None:
        return None
    return AnswerForm(
        tool_format=formats.tools if use.shown else None,
        functions=use.shown,
        reasoning=formats.reasoning,
        is_reasoning_open=prompt.opens_reasoning,
        max_calls=use.max_calls,
    )
