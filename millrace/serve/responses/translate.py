"""POST /v1/responses: its body translated into work, with the stored conversation that it continues."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import msgspec

from millrace.errors import BadRequest
from millrace.serve.generate.job import Job
from millrace.serve.generate.prompts import encode_chat, template_messages
from millrace.serve.generate.sampling import check_model, name_fields, refuse_unsupported
from millrace.serve.generate.work import Work
from millrace.serve.http.body import BodyDecoder
from millrace.serve.http.ids import new_id
from millrace.serve.openai.chat import chat_generation
from millrace.serve.openai.schemas import (
    AssistantMessage,
    ChatRequest,
    ContentPart,
    DeveloperMessage,
    Message,
    SystemMessage,
    TextPart,
    UserMessage,
)
from millrace.serve.responses.schemas import (
    LOGPROBS,
    NOT_SUPPORTED,
    SHARED_WITH_CHAT,
    TEXT_NOT_SUPPORTED,
    InputItem,
    InputText,
    InputTextPart,
    InputTokensRequest,
    OutputText,
    OutputTextPart,
    ResponseAnswer,
    ResponseInputMessage,
    ResponsePart,
    ResponsesRequest,
)
from millrace.serve.responses.write import ResponseShape
from millrace.serve.state import FrontState
from millrace.serve.stored.response_store import Said, add_response, conversation, end_response

LIMIT_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
_KINDS: dict[str, type[Message]] = {
    "user": UserMessage,
    "assistant": AssistantMessage,
    "system": SystemMessage,
    "developer": DeveloperMessage,
}

_responses = BodyDecoder(ResponsesRequest)
_input_tokens = BodyDecoder(InputTokensRequest)
_input_message = BodyDecoder(ResponseInputMessage)


class _Typed(msgspec.Struct):
    type: str | None = None


# ── input ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def input_items(raw: msgspec.Raw) -> list[InputItem]:
    """A text, or messages, as items with ids of their own."""
    try:
        given = msgspec.json.decode(raw, type=str | list[msgspec.Raw])
    except msgspec.ValidationError:
        raise BadRequest("'input' is neither a text nor a list of messages; send one of them.", param="input") from None
    if not given:
        raise BadRequest("'input' is empty; send a text or at least one message.", param="input")
    if isinstance(given, str):
        return [InputItem(id=new_id("msg_"), role="user", content=[InputText(text=given)])]
    return [_item(bytes(one), f"input[{index}]") for index, one in enumerate(given)]


def _item(data: bytes, at: str) -> InputItem:
    try:
        kind = msgspec.json.decode(data, type=_Typed).type
    except msgspec.ValidationError:
        raise BadRequest(f"'{at}' is not a message; send an object with 'role' and 'content'.", param=at) from None
    if kind not in (None, "message"):
        raise BadRequest(
            f"'{at}' is of type {kind[:80]!r}, which is not supported yet; send messages only.",
            param=f"{at}.type",
            code="unsupported_parameter",
        )
    try:
        message = _input_message.decode(data)
    except BadRequest as error:
        field = f"{at}.{error.param}" if error.param else at
        text = error.message.replace(f"'{error.param}'", f"'{field}'")
        raise BadRequest(text, param=field, code=error.code) from None
    refuse_unsupported(message, {"phase": ()}, f"{at}.")
    parts = [message.content] if isinstance(message.content, str) else _texts(message.content, f"{at}.content")
    content: list[InputText | OutputText] = [
        OutputText(text=text) if message.role == "assistant" else InputText(text=text) for text in parts
    ]
    return InputItem(id=new_id("msg_"), role=message.role, content=content)


def _texts(parts: list[ResponsePart], at: str) -> list[str]:
    if not parts:
        raise BadRequest(f"'{at}' is an empty list; send a text.", param=at)
    found = []
    for index, part in enumerate(parts):
        if not isinstance(part, (InputTextPart, OutputTextPart)):
            raise BadRequest(
                f"'{at}[{index}]' is of type '{part.__struct_config__.tag}', which is not supported yet; this server"
                " takes text only.",
                param=f"{at}[{index}].type",
                code="unsupported_parameter",
            )
        found.append(part.text)
    return found


def _message(said: Said) -> Message:
    parts: list[ContentPart] = [TextPart(text=text) for text in said.texts]
    return _KINDS[said.role](content=said.texts[0] if len(said.texts) == 1 else parts)


async def _conversation(
    state: FrontState, body: ResponsesRequest | InputTokensRequest, items: list[InputItem], owner: str
) -> list[Message]:
    """Instructions, then what was said before, then the new input."""
    earlier: list[Said] = []
    previous = body.previous_response_id
    if previous is not None:
        earlier = await state.store.run(conversation, previous, owner)
    now = [Said(item.role, [part.text for part in item.content]) for item in items]
    messages = [_message(said) for said in (*earlier, *now)]
    return [SystemMessage(content=body.instructions), *messages] if body.instructions else messages


def _check(state: FrontState, body: ResponsesRequest | InputTokensRequest) -> None:
    if body.model is not None:
        check_model(body.model, state.model_name)
    refuse_unsupported(body, NOT_SUPPORTED, "")
    if body.text is not None:
        refuse_unsupported(body.text, TEXT_NOT_SUPPORTED, "text.")


# ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def decode_response(data: bytes) -> ResponsesRequest:
    return _responses.decode(data)


async def response_work(
    state: FrontState, data: bytes, received: float, *, owner: str = "", queued: ResponseAnswer | None = None
) -> Work:
    """`queued` is given where a response that was stored before is generated now."""
    body = decode_response(data)
    _check(state, body)
    num_top = _logprobs(body)
    items = input_items(body.input)
    await state.await_engine()
    request = ChatRequest(
        model=state.model_name,
        messages=await _conversation(state, body, items, owner),
        max_completion_tokens=body.max_output_tokens,
        logprobs=num_top is not None,
        top_logprobs=num_top,
        **{name: getattr(body, name) for name in SHARED_WITH_CHAT},
    )
    try:
        generation = await chat_generation(state, request, received)
    except BadRequest as error:
        raise name_fields(error, LIMIT_NAMES) from None
    opening = queued or opening_answer(state, body, new_id("resp_"))
    generation = dataclasses.replace(generation, answer_id=opening.id, writes_details=True, holds_end=True)
    shape = partial(ResponseShape, opening=opening, limit_names=LIMIT_NAMES)
    return Work(generation, shape, partial(_conclude, state, items, owner, queued is not None))


async def _conclude(state: FrontState, items: list[InputItem], owner: str, is_queued: bool, job: Job) -> bytes:
    """Store the response before its client can ask for it."""
    shape = job.shape
    assert isinstance(shape, ResponseShape)
    final = shape.final(job.usage())
    if is_queued:
        await state.store.run(end_response, final)
    elif final.store:
        await state.store.run(add_response, final, owner, items, None)
    return shape.last_frames(final) if job.out is not None else msgspec.json.encode(final)


def opening_answer(state: FrontState, body: ResponsesRequest, response_id: str) -> ResponseAnswer:
    """The response before anything is generated."""
    return ResponseAnswer(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=state.model_name,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=msgspec.UNSET if body.user is None else body.user,
        metadata=body.metadata or {},
    )


def _logprobs(body: ResponsesRequest) -> int | None:
    for name in body.include or ():
        if name != LOGPROBS:
            raise BadRequest(
                f"'include' holds {name[:80]!r}, which is not supported yet; only {LOGPROBS!r} is.", param="include"
            )
    if body.stream_options is not None:
        if not body.stream:
            raise BadRequest(
                "'stream_options' is only allowed when 'stream' is true; remove it or set stream to true.",
                param="stream_options",
            )
        refuse_unsupported(body.stream_options, {"include_obfuscation": (False,)}, "stream_options.")
    if not body.include:
        if body.top_logprobs:
            raise BadRequest(
                f"top_logprobs is {body.top_logprobs}, which needs 'include' to hold {LOGPROBS!r}; add it.",
                param="top_logprobs",
            )
        return None
    return body.top_logprobs or 0


async def count_input_tokens(state: FrontState, data: bytes, owner: str) -> int:
    body = _input_tokens.decode(data)
    _check(state, body)
    messages = await _conversation(state, body, input_items(body.input), owner)
    await state.await_engine()
    token_ids = await encode_chat(
        state,
        template_messages(messages),
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs={},
        max_tokens=None,
    )
    return len(token_ids)
