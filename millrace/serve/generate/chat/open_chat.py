"""A conversation, its tools and its reasoning as a prompt, sampling parameters and the form of the answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from millrace.errors import BadRequest
from millrace.params.grammar import Grammar
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.reasoning import NO_WISH, ReasoningWish, check_wish, thinking_limit
from millrace.serve.generate.chat.tools import NO_TOOLS, ToolUse
from millrace.serve.generate.generation import Prompt
from millrace.serve.generate.messages import Conversation
from millrace.serve.generate.prompts import chat_prompt
from millrace.serve.state import FrontState
from millrace.text.answer_formats import ChatText
from millrace.text.answer_parser import AnswerForm
from millrace.text.grammar.compiler import GrammarError
from millrace.text.reasoning.preamble import preamble
from millrace.text.tools.grammar import answer_head, calls_or, forced_calls, strict_calls


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
    wish: ReasoningWish = NO_WISH,
    keep: int | None = None,
    grammar_field: str = "response_format",
) -> Chat:
    """`grammar_field` is the field that set the grammar, for errors. `keep` cuts the prompt, as in `chat_prompt`."""
    kwargs = wish.template_kwargs() | conversation.template_kwargs
    conversation = dataclasses.replace(conversation, tools=use.shown, template_kwargs=kwargs)
    prompt = await chat_prompt(state, conversation, max_tokens=params.max_tokens, keep=keep)
    return open_prompt(state, prompt, params, use=use, wish=wish, grammar_field=grammar_field)


def open_prompt(
    state: ChatText,
    prompt: Prompt,
    params: SamplingParams,
    *,
    use: ToolUse = NO_TOOLS,
    wish: ReasoningWish = NO_WISH,
    grammar_field: str = "response_format",
) -> Chat:
    """As `open_chat`, for a prompt that is already written."""
    check_wish(state, wish)
    grammar, field = _grammar(state, use, params.grammar, grammar_field)
    if grammar is not None:
        grammar = dataclasses.replace(grammar, after=_before(state, prompt, has_head=grammar is not params.grammar))
    limit = thinking_limit(state, wish, prompt)
    if grammar is not params.grammar or limit is not None:
        params = msgspec.structs.replace(params, grammar=grammar, thinking=limit)
    return Chat(prompt, params, _form(state, use, prompt), field)


def _grammar(state: ChatText, use: ToolUse, given: Grammar | None, field: str) -> tuple[Grammar | None, str]:
    """The grammar of the answer, and the field that set it: of calls that are required or strict, of the format that
    the request asks for, or of either."""
    if not use.shown:
        return given, field
    spec, functions = state.formats.tools, use.shown
    try:
        if use.choice == "required":
            allowed = [function for function in functions if use.only in (None, function.name)]
            source: str | None = forced_calls(spec, allowed, state.tokenizer.marker_id, max_calls=use.max_calls)
        elif given is not None:
            calls = forced_calls(spec, functions, state.tokenizer.marker_id, max_calls=use.max_calls)
            source = calls_or(given, calls, answer_head(spec, state.tokenizer.marker_id))
            if source is None:
                raise BadRequest(
                    f"'{field}' with a {given.noun} cannot be combined with 'tools' that the model may call or not; set"
                    " tool_choice to none or required.",
                    param=field,
                )
        elif any(function.is_strict for function in functions):
            source = strict_calls(spec, functions, state.tokenizer.marker_id, max_calls=use.max_calls)
        else:
            source = None
        return (given, field) if source is None else (Grammar("lark", source), "tools")
    except GrammarError as error:
        raise BadRequest(str(error), param="tools", code="invalid_schema") from None
    except BadRequest as error:
        raise BadRequest(error.message, param="tools" if error.param == "grammar" else error.param) from None


def _before(state: ChatText, prompt: Prompt, *, has_head: bool) -> str:
    """What may stand before the part of the answer that its grammar governs. `has_head`: the grammar itself has the
    head that the model's format begins an answer with."""
    head = "" if has_head else answer_head(state.formats.tools, state.tokenizer.marker_id)
    reasoning = state.formats.reasoning
    if reasoning is None or prompt.closes_reasoning:
        return f"before: {head}" if head else ""
    is_open = prompt.opens_reasoning or reasoning.is_open
    return preamble(reasoning, state.tokenizer.marker_id, is_open=is_open, head=head)


def _form(state: ChatText, use: ToolUse, prompt: Prompt) -> AnswerForm | None:
    formats = state.formats
    reasoning = None if prompt.closes_reasoning else formats.reasoning
    if not use.shown and reasoning is None:
        return None
    return AnswerForm(
        tool_format=formats.tools if use.shown else None,
        functions=use.shown,
        reasoning=reasoning,
        is_reasoning_open=prompt.opens_reasoning,
        is_forced=use.choice == "required",
        max_calls=use.max_calls,
    )
