"""Collects one answer of `LLM` from the engine's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from millrace.errors import BadRequest, MillraceError, RequestFailed
from millrace.link.client import EngineClient
from millrace.link.messages import Finish, TokenLogprobs
from millrace.llm.outputs import Choice, StreamPart, ToolCall
from millrace.params.keeping import Documents
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.answer_reader import AnswerReader
from millrace.serve.generate.chat.tools import arguments_of
from millrace.text.answer_events import ReasoningSaid, TextSaid
from millrace.text.answer_events import ToolCall as WrittenCall
from millrace.text.answer_parser import AnswerForm, marker_ids
from millrace.text.text_stream import TextStream
from millrace.text.tokenizers.tokenizer import Tokenizer

OnPart = Callable[[StreamPart | MillraceError], None]


class Collector:
    """Collects the tokens and text of one choice, aborts it at a stop string and then resolves `done`."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        on_part: OnPart | None,
        form: AnswerForm | None = None,
        schema: object = None,
    ) -> None:
        """`form`: what to look for in the answer; None: everything is text."""
        self._client = client
        self._tokenizer = tokenizer
        self._params = params
        self._on_part = on_part
        self._text = TextStream(tokenizer, params, marker_ids(tokenizer, form))
        self._reader = AnswerReader(form) if form is not None else None
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._request_id: int | None = None
        self.choice: Choice[Any] = Choice(index, logprobs=[] if params.logprobs is not None else None, schema=schema)
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.cached_tokens = self.document_tokens = 0
        self.done: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()

    def submit(self, token_ids: list[int], documents: Documents | None) -> None:
        self._request_id = self._client.submit(
            token_ids, self._params, self, end_token_ids=self._tokenizer.end_token_ids, documents=documents
        )

    def cancel(self) -> None:
        """Abort the request unless it has finished."""
        if self._request_id is not None and not self.done.done():
            self._client.abort(self._request_id)

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._is_stopped:
            return
        if self._reader is not None:
            self._reader.count_token()
        self.choice.token_ids.append(token_id)
        if self.choice.logprobs is not None and logprobs is not None:
            self.choice.logprobs.append(logprobs)
        text, reasoning = self._read(self._text.push(token_id))
        if self._on_part is not None:
            self._on_part(StreamPart(self.choice.index, text, token_id, reasoning=reasoning))
        if self._is_stopped and self._request_id is not None:
            self._client.abort(self._request_id, "stop")

    @property
    def _is_stopped(self) -> bool:
        """True if a stop string or the last permitted call ended the answer."""
        return self._text.stopped_by is not None or (self._reader is not None and self._reader.is_full)

    def _read(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> tuple[str, str]:
        """What this text adds to the answer and to the reasoning before it."""
        said, thought = text, ""
        if self._reader is not None:
            events = self._reader.read(text)
            events += self._reader.finish(is_cut=is_cut) if is_last else []
            said = "".join(event.text for event in events if isinstance(event, TextSaid))
            thought = "".join(event.text for event in events if isinstance(event, ReasoningSaid))
        self._pieces.append(said)
        self._reasoning.append(thought)
        return said, thought

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self.prompt_logprobs = logprobs

    def on_finish(self, finish: Finish) -> None:
        self.cached_tokens, self.document_tokens = finish.cached_tokens, finish.placed_tokens
        if finish.reason == "refused":
            self._fail(BadRequest(finish.message, param="grammar", code="invalid_schema"))
            return
        if finish.reason in ("error", "abort", "deadline") and not self._is_stopped:
            self._fail(RequestFailed(finish.message or f"The request ended early: {finish.reason}."))
            return
        rest, thought = self._read(self._text.finish(), is_last=True, is_cut=finish.reason == "length")
        choice = self.choice
        choice.text, choice.reasoning = "".join(self._pieces), "".join(self._reasoning)
        stop_token = finish.stop_token_id if finish.stop_token_id >= 0 else None
        choice.stopped_by = self._text.stopped_by if self._text.stopped_by is not None else stop_token
        choice.finish_reason = "stop" if self._is_stopped or choice.stopped_by is not None else finish.reason
        if self._reader is not None:
            choice.tool_calls = [_call(call) for call in self._reader.calls]
            if self._reader.has_called and choice.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
        if self._on_part is not None:
            self._on_part(StreamPart(choice.index, rest, choice=choice, reasoning=thought))
        if not self.done.done():
            self.done.set_result(choice)

    def _fail(self, error: MillraceError) -> None:
        if self._on_part is not None:
            self._on_part(error)
            self.done.cancel()
        elif not self.done.done():
            self.done.set_exception(error)


def _call(call: WrittenCall) -> ToolCall:
    return ToolCall(call.id, call.name, arguments_of(call.arguments), call.is_complete)
