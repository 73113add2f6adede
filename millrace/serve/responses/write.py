"""Writes the answers of /v1/responses: one response, or typed events with sequence numbers."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from millrace.errors import MillraceError
from millrace.link.messages import TokenLogprobs
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import Output, TextDelta
from millrace.serve.generate.job import Job
from millrace.serve.generate.logprobs import TokenLogprob, token_logprobs
from millrace.serve.generate.usage import Usage
from millrace.serve.http.error_bodies import ErrorBody
from millrace.serve.http.ids import new_id
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.serve.responses.schemas import (
    Incomplete,
    ItemStatus,
    OutputMessage,
    OutputText,
    ResponseAnswer,
    ResponseFailure,
    ResponseInputDetails,
    ResponseUsage,
)
from millrace.serve.stored.batch_store import OutputTokensDetails


class ResponseWriter:
    def __init__(self, job: Job, opening: ResponseAnswer, limit_names: dict[str, str]) -> None:
        self.limit_names = limit_names
        self._job = job
        self._opening = opening
        self._item_id = new_id("msg_")
        self._number = 0
        self._streamed = Output()

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), escape_lines(encode(event)))

    def _at_part(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def preamble(self, choices: list[Choice]) -> bytes:
        item = OutputMessage(id=self._item_id, status="in_progress", content=[])
        return (
            self._event("response.created", response=self._opening)
            + self._event("response.in_progress", response=self._opening)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._at_part(), part=OutputText(text=""))
        )

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        raise AssertionError("every event has its own sequence number")

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        return b""

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        self._streamed.add(delta)
        logprobs = self._logprobs(delta.logprobs)
        return self._event("response.output_text.delta", **self._at_part(), delta=delta.text, logprobs=logprobs)

    def finish_frame(self, choice: Choice) -> bytes:
        message = self._message(choice)
        part = message.content[0]
        return (
            self._event("response.output_text.done", **self._at_part(), text=part.text, logprobs=part.logprobs)
            + self._event("response.content_part.done", **self._at_part(), part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
        )

    def end_frames(self, usage: Usage) -> bytes:
        return self.last_frames(self.final(usage))

    def last_frames(self, final: ResponseAnswer) -> bytes:
        return self._event(f"response.{final.status}", response=final)

    def error_frames(self, error: MillraceError) -> bytes:
        """`response.failed`, then an `error` event, which clients raise."""
        said = {"code": error.code, "message": error.message, "param": error.param}
        body = ErrorBody(error.message, error.type, error.param, error.code)
        return self._event("response.failed", response=failed(self._opening, error)) + self._event(
            "error", **said, error=body
        )

    # ── the response ──────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, choices: list[CollectedChoice], usage: Usage) -> bytes:
        return encode(self.final(usage))

    def final(self, usage: Usage) -> ResponseAnswer:
        """The whole response, once generation has ended."""
        choice = self._job.choices[0]
        is_cut = choice.finish_reason == "length"
        return msgspec.structs.replace(
            self._opening,
            status="incomplete" if is_cut else "completed",
            incomplete_details=Incomplete("max_output_tokens") if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            output=[self._message(choice)],
            usage=_usage(usage),
        )

    def _message(self, choice: Choice) -> OutputMessage:
        output = choice.output if isinstance(choice, CollectedChoice) else self._streamed
        status: ItemStatus = "incomplete" if choice.finish_reason == "length" else "completed"
        return OutputMessage(
            id=self._item_id,
            status=status,
            content=[OutputText(text=output.text, logprobs=self._logprobs(output.logprobs))],
        )

    def _logprobs(self, entries: list[TokenLogprobs]) -> list[TokenLogprob]:
        num_top = self._job.generation.logprobs
        return [] if num_top is None else token_logprobs(self._job.state.tokenizer, entries, num_top)


def failed(opening: ResponseAnswer, error: MillraceError) -> ResponseAnswer:
    code = "invalid_prompt" if error.status < 500 else "server_error"
    failure = ResponseFailure("rate_limit_exceeded" if error.status == 429 else code, error.message)
    return msgspec.structs.replace(opening, status="failed", error=failure)


def _usage(usage: Usage) -> ResponseUsage:
    details = ResponseInputDetails(usage.cached_tokens, 0)
    return ResponseUsage(usage.prompt_tokens, details, usage.output_tokens, OutputTokensDetails(0), usage.total_tokens)
