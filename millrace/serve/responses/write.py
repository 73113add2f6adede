"""Writes the answers of /v1/responses: one response, or typed events with sequence numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from millrace.errors import MillraceError
from millrace.link.messages import TokenLogprobs
from millrace.serve.generate.choices import Choice, CollectedChoice, DetailedChoice
from millrace.serve.generate.events import TextDelta, Tokens, Usage
from millrace.serve.generate.job import Job
from millrace.serve.generate.logprobs import TokenLogprob, token_logprobs
from millrace.serve.http.error_bodies import ErrorBody
from millrace.serve.http.json_answer import encode, escape_lines
from millrace.serve.responses.schemas import (
    Incomplete,
    ResponseAnswer,
    ResponseFailure,
    ResponseInputDetails,
    ResponseUsage,
)
from millrace.serve.responses.schemas_items import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from millrace.serve.stored.batch_store import OutputTokensDetails
from millrace.text.answer_events import ToolCall

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


@dataclass(slots=True)
class _Part:
    """An item of the output while it is written."""

    kind: Literal["message", "reasoning", "function_call"]
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    call: ToolCall | None = None
    place: tuple[str, str] | None = None
    """Namespace and name of the called function, if it is in a namespace."""
    id: str = ""

    @property
    def called(self) -> str:
        """The function as the client named it."""
        assert self.call is not None
        return self.call.name if self.place is None else self.place[1]

    def content(self, *, is_empty: bool = False) -> OutputText | ReasoningText:
        text = "" if is_empty else "".join(self.texts)
        return ReasoningText(text=text) if self.kind == "reasoning" else OutputText(text=text, logprobs=self.logprobs)

    def item(self, status: ItemStatus, *, is_empty: bool = False) -> OutputItem:
        if self.call is not None:
            call = self.call
            arguments = "" if is_empty else call.arguments
            namespace = msgspec.UNSET if self.place is None else self.place[0]
            named: dict[str, Any] = {"id": self.id, "call_id": call.id, "name": self.called, "namespace": namespace}
            return FunctionCallItem(**named, arguments=arguments, status=status)
        content = [] if is_empty else [self.content()]
        if self.kind == "reasoning":
            thoughts = [part for part in content if isinstance(part, ReasoningText)]
            return ReasoningItem(id=self.id, content=thoughts, status=status)
        texts = [part for part in content if isinstance(part, OutputText)]
        return OutputMessage(id=self.id, content=texts, status=status)


def _status(choice: Choice) -> ItemStatus:
    return "incomplete" if choice.finish_reason == "length" else "completed"


class ResponseWriter:
    def __init__(
        self, job: Job, opening: ResponseAnswer, limit_names: dict[str, str], places: dict[str, tuple[str, str]]
    ) -> None:
        """`places`: namespace and name of functions in namespaces, by the name that the model uses."""
        self.limit_names = limit_names
        self._places = places
        self._job = job
        self._opening = opening
        self._number = 0
        self._items: list[OutputItem] = []
        """Items of a stream that are complete."""
        self._open_part: _Part | None = None

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), escape_lines(encode(event)))

    def preamble(self, choices: list[Choice]) -> bytes:
        created = self._event("response.created", response=self._opening)
        return created + self._event("response.in_progress", response=self._opening)

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        raise AssertionError("every event has its own sequence number")

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        return b""

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes:
        if self._items and self._open_part is None and not delta.text:
            return b""  # Tokens after the last call, such as its closing marker.
        opened = self._open(_Part("message"))
        part = self._open_part
        assert part is not None
        part.texts.append(delta.text)
        logprobs = self._logprobs(delta.logprobs)
        part.logprobs += logprobs
        return opened + self._event("response.output_text.delta", **self._at(), delta=delta.text, logprobs=logprobs)

    def reasoning_delta(self, choice: DetailedChoice, text: str, tokens: Tokens) -> bytes:
        opened = self._open(_Part("reasoning"))
        assert self._open_part is not None
        self._open_part.texts.append(text)
        return opened + self._event("response.reasoning_text.delta", **self._at(), delta=text)

    def call_start(self, choice: DetailedChoice, call: ToolCall, tokens: Tokens) -> bytes:
        return self._open(self._call(call))

    def _call(self, call: ToolCall) -> _Part:
        return _Part("function_call", call=call, place=self._places.get(call.name))

    def call_arguments(self, choice: DetailedChoice, call: ToolCall, text: str, tokens: Tokens) -> bytes:
        return self._event("response.function_call_arguments.delta", **self._at(), delta=text)

    def call_end(self, choice: DetailedChoice, call: ToolCall) -> bytes:
        return self._close("completed" if call.is_complete else "incomplete")

    def finish_frame(self, choice: Choice) -> bytes:
        opened = b"" if self._items or self._open_part is not None else self._open(_Part("message"))
        return opened + self._close(_status(choice))

    def _open(self, part: _Part) -> bytes:
        """Begin an item, unless one of the same kind can be continued."""
        if self._open_part is not None and part.call is None and self._open_part.kind == part.kind:
            return b""
        closed = self._close("completed")
        self._open_part = self._named(part, len(self._items))
        added = self._event(
            "response.output_item.added", output_index=len(self._items), item=part.item("in_progress", is_empty=True)
        )
        if part.call is None:
            added += self._event("response.content_part.added", **self._at(), part=part.content(is_empty=True))
        return closed + added

    def _named(self, part: _Part, number: int) -> _Part:
        part.id = self._job.generation.part_id(0, _PREFIXES[part.kind], number)
        return part

    def _close(self, status: ItemStatus) -> bytes:
        part = self._open_part
        if part is None:
            return b""
        item, at = part.item(status), self._at()
        if part.call is not None:
            arguments = part.call.arguments
            ended = self._event("response.function_call_arguments.done", **at, name=part.called, arguments=arguments)
        else:
            content = part.content()
            said: dict[str, Any] = {"text": content.text}
            if isinstance(content, OutputText):
                said["logprobs"] = content.logprobs
            ended = self._event(f"response.{content.__struct_config__.tag}.done", **at, **said)
            ended += self._event("response.content_part.done", **at, part=content)
        ended += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open_part = None
        return ended

    def _at(self) -> dict[str, Any]:
        part = self._open_part
        assert part is not None
        place: dict[str, Any] = {"item_id": part.id, "output_index": len(self._items)}
        return place if part.call is not None else {**place, "content_index": 0}

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
            output=self._output(choice),
            usage=_usage(usage),
        )

    def _output(self, choice: Choice) -> list[OutputItem]:
        if not isinstance(choice, CollectedChoice):
            return self._items
        items: list[OutputItem] = []
        for said in choice.output.items:
            if isinstance(said, ToolCall):
                part = self._named(self._call(said), len(items))
                items.append(part.item("completed" if said.is_complete else "incomplete"))
            elif said.is_reasoning:
                items.append(self._named(_Part("reasoning", said.parts), len(items)).item("completed"))
            else:
                logprobs = self._logprobs(said.logprobs)
                part = self._named(_Part("message", said.parts, logprobs=logprobs), len(items))
                items.append(part.item("completed"))
        if not items:
            part = self._named(_Part("message", logprobs=self._logprobs(choice.output.logprobs)), 0)
            items.append(part.item("completed"))
        last = items[-1]
        if not isinstance(last, FunctionCallItem):
            last.status = _status(choice)
        return items

    def _logprobs(self, entries: list[TokenLogprobs]) -> list[TokenLogprob]:
        num_top = self._job.generation.logprobs
        return [] if num_top is None else token_logprobs(self._job.state.tokenizer, entries, num_top)


def failed(opening: ResponseAnswer, error: MillraceError) -> ResponseAnswer:
    code = "invalid_prompt" if error.status < 500 else "server_error"
    failure = ResponseFailure("rate_limit_exceeded" if error.status == 429 else code, error.message)
    return msgspec.structs.replace(opening, status="failed", error=failure)


def _usage(usage: Usage) -> ResponseUsage:
    placed = msgspec.UNSET if usage.document_tokens is None else usage.document_tokens
    details = ResponseInputDetails(usage.cached_tokens, 0, placed)
    output = OutputTokensDetails(usage.reasoning_tokens)
    return ResponseUsage(usage.prompt_tokens, details, usage.output_tokens, output, usage.total_tokens)
