"""Translates the bodies of /v1/messages and /v1/messages/count_tokens into work and conversations."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

from msgspec import UNSET

from millrace.errors import BadRequest
from millrace.serve.anthropic.cache_points import retention_of
from millrace.serve.anthropic.context_edits import check_edits, edited
from millrace.serve.anthropic.schemas import (
    NOT_SUPPORTED,
    AppliedEdit,
    ContextManagementAnswer,
    CountTokensAnswer,
    CountTokensContext,
    CountTokensRequest,
    MessagesRequest,
)
from millrace.serve.anthropic.translate_messages import messages_of, referenced_tools, text_content
from millrace.serve.anthropic.write import LIMIT_NAMES, MessageWriter
from millrace.serve.generate.chat.open_chat import open_chat
from millrace.serve.generate.chat.reasoning import ReasoningWish, check_wish, effort_effect
from millrace.serve.generate.chat.tools import ToolUse, function_of, tool_use
from millrace.serve.generate.checks import check_integers, check_range, name_fields, refuse_unsupported
from millrace.serve.generate.fields.documents import documents_note
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.grammars import Format, only_format, schema_format
from millrace.serve.generate.messages import Conversation, Message
from millrace.serve.generate.prompts import encode_chat
from millrace.serve.generate.sampling import deadline_of, sampling_params
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.ids import new_id, warnings
from millrace.serve.sessions.turns import continued, keeping_turn, open_session, taking_turn
from millrace.serve.state import FrontState

_CHOICES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}
_messages = BodyDecoder(MessagesRequest)
_count_tokens = BodyDecoder(CountTokensRequest)


async def prepare_message(state: FrontState, data: bytes, received: float, owner: str) -> Work:
    body = _messages.decode(data)
    state = await state.for_model(body.model)
    _check(body)
    await state.await_engine(body.model)
    try:
        session = await open_session(state, body.session_id, owner)
        conversation, edits = await _conversation(state, body)
        conversation = continued(session, conversation)
        hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        applied = UNSET if edits is None else ContextManagementAnswer(edits)
        writer = partial(MessageWriter, edits=applied, hides_thinking=hides_thinking)
        generation = await _generation(state, body, conversation, received)
        effect = effort_effect(state, _wish(body), generation.params.thinking)
        generation = taking_turn(state, session, owner, conversation, generation)
        return keeping_turn(Work(state, generation, writer, headers=warnings([effect, documents_note(generation)])))
    except BadRequest as error:
        raise name_fields(error, LIMIT_NAMES) from None


async def count_input_tokens(state: FrontState, data: bytes) -> CountTokensAnswer:
    body = _count_tokens.decode(data)
    state = await state.for_model(body.model)
    _check(body)
    await state.await_engine(body.model)
    check_wish(state, _wish(body))
    conversation, edits = await _conversation(state, body)
    num_tokens = len(await encode_chat(state, _rendered(body, conversation)))
    if edits is None:
        return CountTokensAnswer(num_tokens)
    original = num_tokens + sum(edit.cleared_input_tokens for edit in edits)
    return CountTokensAnswer(num_tokens, CountTokensContext(original))


def _rendered(body: CountTokensRequest, conversation: Conversation) -> Conversation:
    """With everything that the chat template reads."""
    return dataclasses.replace(conversation, tools=_tools(body).shown, template_kwargs=_wish(body).template_kwargs())


def _check(body: CountTokensRequest) -> None:
    refuse_unsupported(body, NOT_SUPPORTED, "")
    check_integers(body)
    check_edits(body.context_management)


def _format(body: CountTokensRequest) -> Format | None:
    new = body.output_config.format if body.output_config is not None else None
    given = {"output_config.format": new, "output_format": body.output_format}
    return only_format(schema_format(name, one.schema) for name, one in given.items() if one is not None)


async def _generation(
    state: FrontState, body: MessagesRequest, conversation: Conversation, received: float
) -> Generation:
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise BadRequest(f"temperature is {body.temperature}; it must be between 0 and 1.", param="temperature")
    check_range("top_k", body.top_k, 0, 2**31 - 1)
    wanted = _format(body)
    params = sampling_params(
        state.sampling_defaults,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        grammar=wanted.grammar if wanted is not None else None,
    )
    field = wanted.field if wanted is not None else ""
    chat = await open_chat(state, conversation, params, use=_tools(body), wish=_wish(body), grammar_field=field)
    shown = partial(_rendered, body)
    return Generation(
        prompts=[chat.prompt],
        params=chat.params,
        retain=await retention_of(state, body, conversation, shown, chat.prompt.token_ids),
        form=chat.form,
        answer_id=new_id("msg_"),
        deadline=deadline_of(None, state.config, received),
        stream=bool(body.stream),
        format_field=chat.grammar_field,
    )


async def _conversation(state: FrontState, body: CountTokensRequest) -> tuple[Conversation, list[AppliedEdit] | None]:
    """The conversation after the request's edits, and what they changed; None if the request asks for none. A
    conversation that ends with an assistant message is continued, not answered."""
    if not body.messages:
        raise BadRequest("'messages' is empty; send at least one message.", param="messages")
    messages = [Message("system", text_content(body.system, "system"))] if body.system else []
    for index, message in enumerate(body.messages):
        messages += messages_of(message, f"messages[{index}].content")
    conversation = Conversation(messages, continue_final_message=body.messages[-1].role == "assistant")
    if body.context_management is None:
        return conversation, None

    async def count(messages: list[Message]) -> int:
        shown = _rendered(body, dataclasses.replace(conversation, messages=messages))
        return len(await encode_chat(state, shown, may_cut=True))

    kept, edits = await edited(messages, body.context_management, count)
    return dataclasses.replace(conversation, messages=kept), edits


def _wish(body: CountTokensRequest) -> ReasoningWish:
    thinking, effort = body.thinking, body.output_config.effort if body.output_config is not None else None
    is_on = {"enabled": True, "disabled": False}.get(thinking.type) if thinking is not None else None
    budget = thinking.budget_tokens if thinking is not None else None
    return ReasoningWish(is_on=is_on, effort=effort, max_tokens=budget, field="thinking", effort_is_hint=True)


def _tools(body: CountTokensRequest) -> ToolUse:
    referenced = referenced_tools(body.messages)
    functions = [
        function_of(
            tool.name, tool.description, tool.input_schema, is_strict=bool(tool.strict), param=f"tools[{index}]"
        )
        for index, tool in enumerate(body.tools or ())
        if not tool.defer_loading or tool.name in referenced
    ]
    wanted = body.tool_choice
    if wanted is None:
        return tool_use(functions, None, None, parallel=None)
    if (wanted.type == "tool") != (wanted.name is not None):
        raise BadRequest(
            f"'tool_choice' has the type {wanted.type!r}; a 'name' belongs to the type 'tool', and only to it.",
            param="tool_choice.name",
        )
    choice = _CHOICES[wanted.type]
    return tool_use(functions, choice, wanted.name, parallel=not wanted.disable_parallel_tool_use)
