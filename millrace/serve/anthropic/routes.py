"""Anthropic's API by translation: /v1/messages becomes a chat request, and its answer a message or typed events."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from millrace.errors import BadRequest, MillraceError
from millrace.serve.anthropic.schemas import (
    NOT_SUPPORTED,
    AnthropicUsage,
    Block,
    CountTokensAnswer,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    OutputTextBlock,
    StopReason,
    TextBlock,
)
from millrace.serve.describe.routes_info import json_answer
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice, escape_lines
from millrace.serve.generate.job import Job
from millrace.serve.generate.prompts import encode_chat, template_messages
from millrace.serve.generate.sampling import check_model, check_range, name_fields, refuse_unsupported
from millrace.serve.generate.work import Work
from millrace.serve.http.app_keys import STATE
from millrace.serve.http.body import BodyDecoder, read_body
from millrace.serve.http.error_bodies import anthropic_error_body
from millrace.serve.http.ids import new_id
from millrace.serve.openai.answers import Usage, encode
from millrace.serve.openai.chat import chat_generation
from millrace.serve.openai.routes import respond
from millrace.serve.openai.schemas import (
    AssistantMessage,
    ChatRequest,
    ContentPart,
    Message,
    SystemMessage,
    TextPart,
    UserMessage,
)
from millrace.serve.openai.write_chat import PLACEHOLDER
from millrace.serve.state import FrontState

LIMIT_NAMES = {"prompt": "messages", "stop": "stop_sequences"}


# ── translation ───────────────────────────────────────────────────────────────────────────────────────────────────────
def chat_messages(body: CountTokensRequest) -> list[Message]:
    if not body.messages:
        raise BadRequest("'messages' is empty; send at least one message.", param="messages")
    found: list[Message] = []
    if body.system:
        found.append(SystemMessage(content=_content(body.system, "system")))
    for index, message in enumerate(body.messages):
        content = _content(message.content, f"messages[{index}].content")
        found.append(UserMessage(content=content) if message.role == "user" else AssistantMessage(content=content))
    return found


def _content(content: str | list[Block], at: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if not content:
        raise BadRequest(f"'{at}' is an empty list; send a text.", param=at)
    return [_text_part(block, f"{at}[{index}]") for index, block in enumerate(content)]


def _text_part(block: Block, at: str) -> TextPart:
    if not isinstance(block, TextBlock):
        raise BadRequest(
            f"'{at}' is of type '{block.__struct_config__.tag}', which is not supported yet; this server takes text"
            " only.",
            param=f"{at}.type",
            code="unsupported_parameter",
        )
    refuse_unsupported(block, {"citations": ([],)}, f"{at}.")
    return TextPart(text=block.text)


def _continues(body: CountTokensRequest) -> bool:
    """A conversation that ends with the assistant's words is one whose answer has begun with them."""
    return body.messages[-1].role == "assistant"


def _chat_request(body: MessagesRequest) -> ChatRequest:
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise BadRequest(f"temperature is {body.temperature}; it must be between 0 and 1.", param="temperature")
    check_range("top_k", body.top_k, 0, 2**31 - 1)
    messages = chat_messages(body)
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
        continue_final_message=_continues(body),
    )


# ── routes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
_messages = BodyDecoder(MessagesRequest)
_count_tokens = BodyDecoder(CountTokensRequest)


async def message_work(state: FrontState, data: bytes, received: float) -> Work:
    body = _messages.decode(data)
    check_model(body.model, state.model_name)
    refuse_unsupported(body, NOT_SUPPORTED, "")
    await state.await_engine()
    try:
        generation = await chat_generation(state, _chat_request(body), received)
    except BadRequest as error:
        raise name_fields(error, LIMIT_NAMES) from None
    return Work(dataclasses.replace(generation, answer_id=new_id("msg_")), MessageShape)


async def messages(request: web.Request) -> web.StreamResponse:
    return await respond(request, message_work)


async def count_tokens(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _count_tokens.decode(await read_body(request, state.body_limit_bytes))
    check_model(body.model, state.model_name)
    refuse_unsupported(body, NOT_SUPPORTED, "")
    await state.await_engine()
    chat = chat_messages(body)
    token_ids = await encode_chat(
        state,
        template_messages(chat),
        add_generation_prompt=not _continues(body),
        continue_final_message=_continues(body),
        template_kwargs={},
        max_tokens=None,
    )
    return json_answer(request, CountTokensAnswer(len(token_ids)))


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), escape_lines(encode({"type": kind, **fields})))


class MessageShape:
    """How /v1/messages writes its answers."""

    def __init__(self, job: Job) -> None:
        self.limit_names = LIMIT_NAMES
        self._job = job

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def preamble(self, choices: list[Choice]) -> bytes:
        """How much of the prompt was cached is known at the end only, and said there."""
        opening = self._message([], None, AnthropicUsage(len(choices[0].prompt.token_ids), 0, 0, 0))
        block = OutputTextBlock("text", "")
        return _event("message_start", message=opening) + _event("content_block_start", index=0, content_block=block)

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        shaped = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": PLACEHOLDER})
        before, _, after = shaped.partition(encode(PLACEHOLDER))
        return before, after

    def prompt_chunk(self, choice: DetailedChoice) -> bytes:
        return b""

    def chunk(self, choice: DetailedChoice, text: str) -> bytes:
        choice.take_pending()
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def finish_frame(self, choice: Choice) -> bytes:
        return _event("content_block_stop", index=0)

    def end_frames(self, usage: Usage) -> bytes:
        reason, sequence = _stop_reason(self._job.choices[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def error_frames(self, error: MillraceError) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_error_body(error)

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        text = choices[0].answer_text
        content = [OutputTextBlock("text", text)] if text else []
        return encode(self._message(content, choices[0], _usage(usage)))

    def _message(
        self, content: list[OutputTextBlock], ended: CollectedChoice | None, usage: AnthropicUsage
    ) -> MessageAnswer:
        reason, sequence = _stop_reason(ended) if ended is not None else (None, None)
        answer_id, model = self._job.generation.answer_id, self._job.state.model_name
        return MessageAnswer(answer_id, "message", "assistant", model, content, reason, sequence, usage)


def _stop_reason(choice: Choice) -> tuple[StopReason, str | None]:
    if choice.finish_word == "length":
        return "max_tokens", None
    stopped_by = choice.stop_reason
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


def _usage(usage: Usage) -> AnthropicUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(usage.prompt_tokens - cached, cached, 0, usage.completion_tokens)
