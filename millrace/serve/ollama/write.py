"""Answers and errors of Ollama's API: one JSON object per line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, UnsetType

from millrace.errors import MillraceError
from millrace.link.messages import TokenLogprobs
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Tokens, Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.logprobs import TokenLogprob, token_logprobs
from millrace.serve.generate.writer import PLACEHOLDER
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.serve.ollama.schemas import (
    OllamaAnswer,
    OllamaAnswerCall,
    OllamaAnswerMessage,
    OllamaCalledFunction,
    OllamaErrorAnswer,
)
from millrace.text.answer_events import ToolCall

_NS_PER_S = 1e9


def error_body(error: MillraceError) -> bytes:
    return encode(OllamaErrorAnswer(error.message, error.message, error.type, error.param, error.code))


def error_line(error: MillraceError) -> bytes:
    return error_body(error) + b"\n"


def said(
    text: str, *, is_chat: bool, thinking: str | UnsetType = UNSET, calls: list[OllamaAnswerCall] | UnsetType = UNSET
) -> dict[str, Any]:
    """The fields of a line in which /api/chat and /api/generate differ."""
    if is_chat:
        return {"message": OllamaAnswerMessage("assistant", text, thinking, calls)}
    return {"response": text, "thinking": thinking}


def empty_line(waits_for: str, *, model: str, is_chat: bool) -> bytes:
    """Keeps a stream alive: more of the answer, with no text."""
    return encode(OllamaAnswer(model, now(), **said("", is_chat=is_chat))) + b"\n"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class OllamaWriter:
    """/api/chat and /api/generate, which differ in the field that holds the text."""

    def __init__(self, job: Job, limit_names: dict[str, str], is_chat: bool) -> None:
        self.limit_names = limit_names
        self._job = job
        self._is_chat = is_chat
        self._sent_ids: list[int] = []
        """Token ids of the answer so far, of streams that end with a `context`."""

    def _line(
        self,
        text: str,
        thinking: str | UnsetType = UNSET,
        calls: list[OllamaAnswerCall] | UnsetType = UNSET,
        **fields: Any,
    ) -> OllamaAnswer:
        shape = said(text, is_chat=self._is_chat, thinking=thinking, calls=calls)
        return OllamaAnswer(self._job.state.answers_as, now(), **shape, **fields)

    def _logprobs(self, entries: list[TokenLogprobs]) -> list[TokenLogprob] | UnsetType:
        num_top = self._job.generation.logprobs
        if num_top is None:
            return UNSET
        return token_logprobs(self._job.state.tokenizer, entries, num_top)

    def _last(self, text: str, usage: Usage, **fields: Any) -> OllamaAnswer:
        choice = self._job.choices[0]
        finish = choice.finish
        total_s = finish.total_s if finish is not None else 0.0
        first_s = finish.first_token_s if finish is not None else 0.0
        queued_s = finish.queued_s if finish is not None else 0.0
        dropped = choice.prompt.num_dropped if self._job.generation.reports_dropped else UNSET
        return self._line(
            text,
            done=True,
            done_reason="length" if choice.finish_reason == "length" else "stop",
            total_duration=round(total_s * _NS_PER_S),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=round(max(0.0, first_s - queued_s) * _NS_PER_S),
            eval_count=usage.output_tokens,
            eval_duration=round(max(0.0, total_s - first_s) * _NS_PER_S),
            truncated_messages=dropped if self._is_chat else UNSET,
            document_tokens=UNSET if usage.document_tokens is None else usage.document_tokens,
            truncated_prompt_tokens=UNSET if self._is_chat else dropped,
            **fields,
        )

    def _context(self, answer_ids: list[int]) -> list[int] | UnsetType:
        """Prompt and answer, without the token that ended it and without a stop string."""
        if not self._job.generation.return_token_ids:
            return UNSET
        choice, tokenizer = self._job.choices[0], self._job.state.tokenizer
        if choice.is_stopped and isinstance(choice.stop_reason, str):
            text, found, _ = tokenizer.decode(answer_ids, skip_special=False).partition(choice.stop_reason)
            answer_ids = tokenizer.encode(text, add_special=False) if found else answer_ids
        elif answer_ids and choice.finish is not None and choice.finish.stop_token_id == answer_ids[-1]:
            answer_ids = answer_ids[:-1]
        return choice.prompt.token_ids + answer_ids

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def preamble(self, choices: list[Choice]) -> bytes:
        return b""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = encode(self._line(PLACEHOLDER)).partition(encode(PLACEHOLDER))
        return before, after + b"\n"

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        return b""

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        self._sent_ids += delta.token_ids
        return escape_lines(encode(self._line(delta.text, logprobs=self._logprobs(delta.logprobs)))) + b"\n"

    def reasoning_delta(self, choice: DetailedChoice, text: str, tokens: Tokens) -> bytes:
        self._sent_ids += tokens.token_ids
        line = self._line("", thinking=text, logprobs=self._logprobs(tokens.logprobs))
        return escape_lines(encode(line)) + b"\n"

    def call_start(self, choice: DetailedChoice, call: ToolCall, tokens: Tokens) -> bytes:
        return b""

    def call_arguments(self, choice: DetailedChoice, call: ToolCall, text: str, tokens: Tokens) -> bytes:
        return b""

    def call_end(self, choice: DetailedChoice, call: ToolCall) -> bytes:
        """Ollama's clients take calls whole. One that broke off is no call: its arguments are sent as text."""
        line = self._line("", calls=[_call(call)]) if call.is_complete else self._line(_broken(call))
        return escape_lines(encode(line)) + b"\n"

    def finish_frame(self, choice: Choice) -> bytes:
        return b""

    def end_frames(self, usage: Usage) -> bytes:
        return encode(self._last("", usage, context=self._context(self._sent_ids))) + b"\n"

    def error_frames(self, error: MillraceError) -> bytes:
        return error_line(error)

    # ── whole answers ─────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        output = choices[0].output
        text = output.text + "".join(_broken(call) for call in output.calls if not call.is_complete)
        calls = [_call(call) for call in output.calls if call.is_complete]
        return encode(
            self._last(
                text,
                usage,
                thinking=output.reasoning or UNSET,
                calls=calls or UNSET,
                logprobs=self._logprobs(output.logprobs),
                context=self._context(output.token_ids),
            )
        )


def _call(call: ToolCall) -> OllamaAnswerCall:
    return OllamaAnswerCall(call.id, OllamaCalledFunction(call.index, call.name, json.loads(call.arguments)))


def _broken(call: ToolCall) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}'
