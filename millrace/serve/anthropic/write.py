"""Answers and errors of /v1/messages: a whole message, or typed events."""

from __future__ import annotations

import json
from typing import Any

from msgspec import UNSET, UnsetType

from millrace.errors import MillraceError
from millrace.serve.anthropic.schemas import (
    AnthropicErrorAnswer,
    AnthropicErrorBody,
    AnthropicUsage,
    ContextManagementAnswer,
    ErrorDetails,
    MessageAnswer,
    OutputBlock,
    OutputTextBlock,
    OutputThinkingBlock,
    OutputToolUseBlock,
    StopReason,
)
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import SaidText, TextDelta, Tokens, Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.writer import PLACEHOLDER
from millrace.serve.http.event_stream import comment
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.text.answer_events import ToolCall
from millrace.text.tools.json_scanner import close_partial

SIGNATURE = "unsigned"
"""Clients expect a signature of thinking blocks. Nothing here checks it."""
LIMIT_NAMES = {"prompt": "messages", "stop": "stop_sequences"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def ping(waits_for: str) -> bytes:
    return comment(waits_for) + _event("ping")


def stream_error(error: MillraceError) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(error)


def error_body(error: MillraceError) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = ErrorDetails("thread_unsupported_request", ["thread"]) if error.param == "thread" else UNSET
    body = AnthropicErrorBody(error.message, kind, error.param, error.code, details)
    return encode(AnthropicErrorAnswer("error", body))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), escape_lines(encode({"type": kind, **fields})))


class MessageWriter:
    def __init__(
        self, job: Job, edits: ContextManagementAnswer | UnsetType = UNSET, *, hides_thinking: bool = False
    ) -> None:
        """`hides_thinking`: thinking blocks are empty."""
        self.limit_names = LIMIT_NAMES
        self._job = job
        self._edits = edits
        self._hides_thinking = hides_thinking
        self._is_parsed = job.generation.form is not None
        self._block = 0
        """Index of the open block, or of the next one."""
        self._open_kind: str | None = None

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def preamble(self, choices: list[Choice]) -> bytes:
        # The number of cached prompt tokens is known only at the end.
        opening = self._message([], None, AnthropicUsage(len(choices[0].prompt.token_ids), 0, 0, 0))
        start = _event("message_start", message=opening)
        # A text that is not parsed has one block, so that its frames are constant.
        return start if self._is_parsed else start + self._open("text", OutputTextBlock(""))

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        shaped = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": PLACEHOLDER})
        before, _, after = shaped.partition(encode(PLACEHOLDER))
        return before, after

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        return b""

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        return self._open("text", OutputTextBlock("")) + self._delta(type="text_delta", text=delta.text)

    def reasoning_delta(self, choice: DetailedChoice, text: str, tokens: Tokens) -> bytes:
        opened = self._open("thinking", OutputThinkingBlock("", ""))
        return opened if self._hides_thinking else opened + self._delta(type="thinking_delta", thinking=text)

    def call_start(self, choice: DetailedChoice, call: ToolCall, tokens: Tokens) -> bytes:
        return self._close() + self._open("tool_use", OutputToolUseBlock(_tool_use_id(call), call.name, {}))

    def call_arguments(self, choice: DetailedChoice, call: ToolCall, text: str, tokens: Tokens) -> bytes:
        return self._delta(type="input_json_delta", partial_json=text)

    def call_end(self, choice: DetailedChoice, call: ToolCall) -> bytes:
        return self._close()

    def _open(self, kind: str, block: OutputBlock) -> bytes:
        """Begin a block of this kind, unless one is open."""
        if self._open_kind == kind:
            return b""
        closed = self._close()
        self._open_kind = kind
        return closed + _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> bytes:
        if self._open_kind is None:
            return b""
        signed = self._delta(type="signature_delta", signature=SIGNATURE) if self._open_kind == "thinking" else b""
        frame = signed + _event("content_block_stop", index=self._block)
        self._open_kind = None
        self._block += 1
        return frame

    def finish_frame(self, choice: Choice) -> bytes:
        return self._close()

    def end_frames(self, usage: Usage) -> bytes:
        reason, sequence = _stop_reason(self._job.choices[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        edits = {} if isinstance(self._edits, UnsetType) else {"context_management": self._edits}
        return _event("message_delta", delta=delta, usage=_usage(usage), **edits) + _event("message_stop")

    def error_frames(self, error: MillraceError) -> bytes:
        return stream_error(error)

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        content = [self._said(said) for said in choices[0].output.items]
        return encode(self._message(content, choices[0], _usage(usage)))

    def _message(
        self, content: list[OutputBlock], ended: CollectedChoice | None, usage: AnthropicUsage
    ) -> MessageAnswer:
        reason, sequence = _stop_reason(ended) if ended is not None else (None, None)
        answer_id, model = self._job.generation.answer_id, self._job.state.answers_as
        edits = self._edits if ended is not None else UNSET
        return MessageAnswer(answer_id, "message", "assistant", model, content, reason, sequence, usage, edits)

    def _said(self, said: SaidText | ToolCall) -> OutputBlock:
        if isinstance(said, ToolCall):
            return OutputToolUseBlock(_tool_use_id(said), said.name, json.loads(close_partial(said.arguments)))
        if said.is_reasoning:
            return OutputThinkingBlock("" if self._hides_thinking else said.text, SIGNATURE)
        return OutputTextBlock(said.text)


def _tool_use_id(call: ToolCall) -> str:
    """The call's id as Anthropic's ids look. Requests may use any id."""
    return "toolu_" + call.id.removeprefix("call_")


def _stop_reason(choice: Choice) -> tuple[StopReason, str | None]:
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    stopped_by = choice.stop_reason
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


def _usage(usage: Usage) -> AnthropicUsage:
    cached = usage.cached_tokens
    created = usage.created_tokens
    placed = UNSET if usage.document_tokens is None else usage.document_tokens
    return AnthropicUsage(usage.prompt_tokens - cached - created, cached, created, usage.output_tokens, placed)
