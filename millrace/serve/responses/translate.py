"""Translates the body of POST /v1/responses into work, with the stored conversation that it continues."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from millrace.errors import BadRequest
from millrace.params.keeping import Retain
from millrace.serve.generate.chat.open_chat import open_chat
from millrace.serve.generate.chat.reasoning import ReasoningWish, check_wish
from millrace.serve.generate.chat.tools import ToolUse
from millrace.serve.generate.chat.verbosity import verbosity_kwargs
from millrace.serve.generate.checks import (
    check_integers,
    check_logprobs,
    check_metadata,
    name_fields,
    refuse_unsupported,
)
from millrace.serve.generate.choosing.sampler_fields import sampler_options
from millrace.serve.generate.fields.documents import DocumentCache, documents_note
from millrace.serve.generate.fields.priority import ServiceTier, priority_of
from millrace.serve.generate.fields.retaining import IN_MEMORY_S, retention_of
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.grammars import Format, format_of, schema_format
from millrace.serve.generate.job import Job
from millrace.serve.generate.messages import Conversation, Message
from millrace.serve.generate.prompts import encode_chat, without_oldest
from millrace.serve.generate.sampling import complete, deadline_of, salt_of, sampling_params
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.ids import new_id, warnings
from millrace.serve.responses import conversations
from millrace.serve.responses.items import messages_of
from millrace.serve.responses.references import errors_at, with_items
from millrace.serve.responses.schemas import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    NOT_SUPPORTED,
    STREAM_OPTIONS_NOT_SUPPORTED,
    ConversationId,
    InputTextPart,
    InputTokensRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutputTextPart,
    RefusalPart,
    ResponseAnswer,
    ResponseInputMessage,
    ResponsePart,
    ResponsesRequest,
    TextFormat,
    TextSettings,
    UsedReasoning,
)
from millrace.serve.responses.schemas_items import (
    FunctionCallItem,
    FunctionResultItem,
    InputItem,
    InputMessage,
    InputText,
    OutputText,
    ReasoningItem,
    ResponseInputCall,
    ResponseInputReasoning,
    ResponseInputResult,
)
from millrace.serve.responses.store import add_response, conversation, end_response
from millrace.serve.responses.translate_tools import tools_of
from millrace.serve.responses.write import ResponseWriter
from millrace.serve.sessions.store import Session
from millrace.serve.sessions.turns import continued, keeping_turn, open_session, taking_turn
from millrace.serve.state import FrontState

LIMIT_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
_SAMPLING = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p"),
    *("repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids", "include_stop_str_in_output"),
    "skip_special_tokens",
)
"""Fields that are named as in `SamplingParams`."""

_responses = BodyDecoder(ResponsesRequest)
_input_tokens = BodyDecoder(InputTokensRequest)
_input_items: dict[
    str,
    BodyDecoder[ResponseInputMessage]
    | BodyDecoder[ResponseInputCall]
    | BodyDecoder[ResponseInputResult]
    | BodyDecoder[ResponseInputReasoning],
] = {
    "message": BodyDecoder(ResponseInputMessage),
    "function_call": BodyDecoder(ResponseInputCall),
    "function_call_output": BodyDecoder(ResponseInputResult),
    "reasoning": BodyDecoder(ResponseInputReasoning),
}


class _Typed(msgspec.Struct):
    type: str | None = None


# ── input ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def input_items(raw: msgspec.Raw, at: str = "input") -> list[InputItem]:
    """A text, or messages, as items with ids of their own."""
    try:
        given = msgspec.json.decode(raw, type=str | list[msgspec.Raw])
    except msgspec.ValidationError:
        raise BadRequest(f"'{at}' must be a text or a list of messages.", param=at) from None
    if not given:
        raise BadRequest(f"'{at}' is empty; send a text or at least one message.", param=at)
    if isinstance(given, str):
        return [InputMessage(id=new_id("msg_"), role="user", content=[InputText(text=given)])]
    return [_item(bytes(one), f"{at}[{index}]") for index, one in enumerate(given)]


def _item(data: bytes, at: str) -> InputItem:
    try:
        kind = msgspec.json.decode(data, type=_Typed).type
    except msgspec.ValidationError:
        raise BadRequest(f"'{at}' is not a message; send an object with 'role' and 'content'.", param=at) from None
    decoder = _input_items.get(kind or "message")
    if decoder is None:
        raise BadRequest(
            f"'{at}' is of type {str(kind)[:80]!r}, which is not supported yet; send {', '.join(_input_items)} only.",
            param=f"{at}.type",
            code="unsupported_parameter",
        )
    with errors_at(at):
        given = decoder.decode(data)
    if isinstance(given, ResponseInputCall):
        return FunctionCallItem(
            id=new_id("fc_"),
            call_id=given.call_id,
            name=given.name,
            arguments=given.arguments,
            status=given.status or "completed",
            namespace=given.namespace or msgspec.UNSET,
        )
    if isinstance(given, ResponseInputResult):
        output = given.output if isinstance(given.output, str) else "\n".join(part.text for part in given.output)
        return FunctionResultItem(id=new_id("fco_"), call_id=given.call_id, output=output)
    if isinstance(given, ResponseInputReasoning):
        return ReasoningItem(
            id=new_id("rs_"), summary=given.summary, content=given.content or [], status=given.status or "completed"
        )
    return _message_item(given, at)


def _message_item(message: ResponseInputMessage, at: str) -> InputMessage:
    parts: list[tuple[str, DocumentCache | None]]
    parts = [(message.content, None)] if isinstance(message.content, str) else _texts(message.content, f"{at}.content")
    content: list[InputText | OutputText] = [
        OutputText(text=text) if message.role == "assistant" and cache is None else InputText(text=text, cache=cache)
        for text, cache in parts
    ]
    return InputMessage(id=new_id("msg_"), role=message.role, content=content)


def _texts(parts: list[ResponsePart], at: str) -> list[tuple[str, DocumentCache | None]]:
    """Each part's text, and how it may be reused."""
    if not parts:
        raise BadRequest(f"'{at}' is an empty list; send a text.", param=at)
    found: list[tuple[str, DocumentCache | None]] = []
    for index, part in enumerate(parts):
        if isinstance(part, RefusalPart):
            found.append((part.refusal, None))
            continue
        if not isinstance(part, (InputTextPart, OutputTextPart)):
            raise BadRequest(
                f"'{at}[{index}]' is of type '{part.__struct_config__.tag}', which is not supported yet; this server"
                " takes text only.",
                param=f"{at}[{index}].type",
                code="unsupported_parameter",
            )
        found.append((part.text, part.cache if isinstance(part, InputTextPart) else None))
    return found


async def _conversation(
    state: FrontState, body: ResponsesRequest | InputTokensRequest, items: list[InputItem], owner: str
) -> list[Message]:
    """Instructions, then the stored conversation, then the new input."""
    messages = [Message("system", body.instructions)] if body.instructions else []
    if body.conversation is not None:
        if body.previous_response_id is not None:
            raise BadRequest(
                "'conversation' and 'previous_response_id' are both set; send one of them.", param="conversation"
            )
        messages += await state.store.run(conversations.messages, conversation_id(body), owner)
    if body.previous_response_id is not None:
        messages += await state.store.run(conversation, body.previous_response_id, owner)
    return messages + messages_of(items)


def conversation_id(body: ResponsesRequest | InputTokensRequest) -> str:
    """The stored conversation's id; empty without one."""
    given = body.conversation
    return given.id if isinstance(given, ConversationId) else given or ""


async def _state_of(state: FrontState, body: ResponsesRequest | InputTokensRequest) -> FrontState:
    return await state.for_model(body.model)


def _check(body: ResponsesRequest | InputTokensRequest) -> None:
    refuse_unsupported(body, NOT_SUPPORTED, "")


# ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def decode_response(data: bytes) -> ResponsesRequest:
    return _responses.decode(data)


async def prepare_response(
    state: FrontState,
    data: bytes,
    received: float,
    owner: str,
    *,
    queued: ResponseAnswer | None = None,
    response_id: str | None = None,
) -> Work:
    """`queued` is the stored response if it is generated in the background. `response_id`: None: a new one."""
    body = decode_response(data)
    state = await _state_of(state, body)
    _check(body)
    num_top = _logprobs(body)
    items = input_items(await with_items(state, body.input, owner))
    await state.await_engine(body.model)
    tools = tools_of(body)
    opening = queued or opening_answer(state, body, response_id or new_id("resp_"))
    try:
        session = await _session(state, body, owner)
        messages = await _conversation(state, body, items, owner)
        conversation = continued(session, _rendered(state, body, messages))
        generation = await _generation(state, body, conversation, tools.use, num_top, opening.id, received)
        generation = taking_turn(state, session, owner, conversation, generation)
    except BadRequest as error:
        raise name_fields(error, LIMIT_NAMES) from None
    if body.truncation == "auto":
        opening = msgspec.structs.replace(opening, truncated_input_items=generation.prompts[0].num_dropped)
    make_writer = partial(ResponseWriter, opening=opening, limit_names=LIMIT_NAMES, places=tools.places)
    kept = _Kept(items, owner, queued is not None, conversation_id(body))
    said = warnings([tools.warning, documents_note(generation)])
    return keeping_turn(Work(state, generation, make_writer, partial(_conclude, state, kept), said))


async def _session(state: FrontState, body: ResponsesRequest, owner: str) -> Session | None:
    for name in ("conversation", "previous_response_id"):
        if body.session_id is not None and getattr(body, name) is not None:
            raise BadRequest(f"'session_id' and '{name}' are both set; send one of them.", param="session_id")
    return await open_session(state, body.session_id, owner)


def _rendered(state: FrontState, body: ResponsesRequest, messages: list[Message]) -> Conversation:
    kwargs = verbosity_kwargs(state, body.text.verbosity if body.text is not None else None, "text.verbosity")
    return Conversation(messages, template_kwargs=kwargs | (body.chat_template_kwargs or {}))


async def _generation(
    state: FrontState,
    body: ResponsesRequest,
    conversation: Conversation,
    use: ToolUse,
    num_top: int | None,
    response_id: str,
    received: float,
) -> Generation:
    check_integers(body)
    check_metadata(body.metadata)
    check_logprobs("top_logprobs", num_top)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING} | sampler_options(body)
    wanted = _format(body)
    params = sampling_params(
        state.sampling_defaults,
        **fields,
        max_tokens=body.max_output_tokens,
        logprobs=num_top,
        grammar=wanted.grammar if wanted is not None else None,
    )
    num_dropped = 0
    if body.truncation == "auto":
        shown = dataclasses.replace(conversation, tools=use.shown)
        messages = await without_oldest(state, shown, max_tokens=body.max_output_tokens)
        num_dropped = len(conversation.messages) - len(messages)
        conversation = dataclasses.replace(conversation, messages=messages)
    chat = await open_chat(state, conversation, params, use=use, wish=_wish(body), grammar_field="text.format")
    return Generation(
        prompts=[dataclasses.replace(chat.prompt, num_dropped=num_dropped)],
        params=await complete(state, chat.params),
        form=chat.form,
        answer_id=response_id,
        deadline=deadline_of(body.timeout, state.config, received),
        asked_priority=priority_of(body.priority, body.service_tier),
        cache_salt=salt_of(body.cache_salt),
        retain=retention_of(body.prompt_cache_key, body.prompt_cache_retention) or _turns_kept(body, chat.prompt),
        stream=bool(body.stream),
        logprobs=num_top,
        writes_details=True,
        holds_end=True,
        format_field=chat.grammar_field,
    )


def _turns_kept(body: ResponsesRequest, prompt: Prompt) -> Retain | None:
    """What a stored conversation has computed is likely to be continued. What follows a document is never kept."""
    name = conversation_id(body)
    if prompt.documents is not None or (not name and body.previous_response_id is None):
        return None
    return Retain(IN_MEMORY_S, f"conversation:{name}" if name else "", covers_answer=True)


def _format(body: ResponsesRequest) -> Format | None:
    match body.text.format if body.text is not None else None:
        case JsonObjectFormat():
            return format_of("text.format", "json_object")
        case JsonSchemaFormat(schema=schema):
            return schema_format("text.format", schema)
    return None


def _wish(body: ResponsesRequest | InputTokensRequest) -> ReasoningWish:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return ReasoningWish(effort=effort, field="reasoning.effort")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is stored with a response when it ends."""

    items: list[InputItem]
    owner: str
    is_queued: bool
    """It is stored already, and is generated in the background."""
    conversation_id: str


async def _conclude(state: FrontState, kept: _Kept, job: Job) -> bytes:
    """Store the response before the client learns its end and can ask for it."""
    writer = job.writer
    assert isinstance(writer, ResponseWriter)
    final = writer.final(job.usage())
    if kept.is_queued:
        await state.store.run(end_response, final)
    elif final.store:
        await state.store.run(add_response, final, kept.owner, kept.items, None)
    if kept.conversation_id:
        turn = (kept.conversation_id, kept.owner, kept.items, final.output)
        await state.store.run(conversations.continue_with, *turn)
    return writer.last_frames(final) if job.out is not None else msgspec.json.encode(final)


def opening_answer(state: FrontState, body: ResponsesRequest, response_id: str) -> ResponseAnswer:
    """The response before anything is generated."""
    used = state.sampling_defaults.fill({"temperature": body.temperature, "top_p": body.top_p})
    return ResponseAnswer(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        service_tier=_tier(body.service_tier),
        model=state.answers_as,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=UsedReasoning(body.reasoning.effort, body.reasoning.summary)
        if body.reasoning is not None
        else UsedReasoning(),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        text=TextSettings((body.text.format if body.text is not None else None) or TextFormat()),
        temperature=used.get("temperature", 1.0),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        tool_choice=body.tool_choice or "auto",
        tools=tools_of(body).given,
        top_logprobs=body.top_logprobs or 0,
        top_p=used.get("top_p", 1.0),
        user=msgspec.UNSET if body.user is None else body.user,
        metadata=body.metadata or {},
        client_metadata=msgspec.UNSET if body.client_metadata is None else body.client_metadata,
        truncation=body.truncation or "disabled",
        conversation=None if body.conversation is None else ConversationId(id=conversation_id(body)),
    )


def _tier(wanted: ServiceTier | None) -> Literal["default", "flex", "priority"]:
    return "default" if wanted is None or wanted == "auto" else wanted


def _logprobs(body: ResponsesRequest) -> int | None:
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise BadRequest(
                f"'include' contains {name[:80]!r}, which is not supported yet; {LOGPROBS!r} is.",
                param="include",
                code="unsupported_parameter",
            )
    if body.stream_options is not None:
        if not body.stream:
            raise BadRequest(
                "'stream_options' is only allowed when 'stream' is true; remove it or set stream to true.",
                param="stream_options",
            )
        refuse_unsupported(body.stream_options, STREAM_OPTIONS_NOT_SUPPORTED, "stream_options.")
    if LOGPROBS not in (body.include or ()):
        if body.top_logprobs:
            raise BadRequest(
                f"top_logprobs is {body.top_logprobs}, which needs {LOGPROBS!r} in 'include'; add it.",
                param="top_logprobs",
            )
        return None
    return body.top_logprobs or 0


async def count_input_tokens(state: FrontState, data: bytes, owner: str) -> int:
    body = _input_tokens.decode(data)
    state = await _state_of(state, body)
    _check(body)
    check_integers(body)
    sampling_params(state.sampling_defaults, **sampler_options(body))  # Refuses what an answer would.
    messages = await _conversation(state, body, input_items(await with_items(state, body.input, owner)), owner)
    await state.await_engine(body.model)
    wish = _wish(body)
    check_wish(state, wish)
    counted = Conversation(messages, tools=tools_of(body).use.shown, template_kwargs=wish.template_kwargs())
    try:
        return len(await encode_chat(state, counted))
    except BadRequest as error:
        raise name_fields(error, LIMIT_NAMES) from None
