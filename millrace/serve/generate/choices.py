"""One choice of an answer: receives the engine's tokens and turns them into text, then frames.

`on_token` runs once per token and is the front's hottest code: detokenise, escape, write. It never raises, because the
same engine message also carries tokens of other requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Protocol

from millrace.link.messages import Finish, TokenLogprobs
from millrace.params.classes import FinishReason
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.chat.answer_reader import AnswerReader
from millrace.serve.generate.events import AnswerFinish, Output, TextDelta, Tokens
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.resuming.marks import FrameSink
from millrace.serve.http.event_stream import EventStream
from millrace.serve.http.json_answer import encode, escape_text
from millrace.text.answer_events import AnswerEvent, CallArguments, CallStart, ReasoningSaid, TextSaid, ToolCall
from millrace.text.text_stream import TextStream

_SIZE_LINES = tuple(b"%x\r\n" % size for size in range(4096))
"""First line of an HTTP chunk by the chunk's size; a lookup beats formatting it."""


class ChoiceOwner(Protocol):
    """What a choice needs of its job."""

    @property
    def generation(self) -> Generation: ...

    def on_choice_end(self, choice: Choice, finish: Finish) -> None: ...

    def on_bug(self, error: Exception) -> None: ...

    def abort_choice(self, choice: Choice, reason: FinishReason) -> None: ...


class Choice(ABC):
    """State that all choices share. Subclasses define what happens to a token."""

    __slots__ = (
        "_closed",
        "_has_stop_strings",
        "_push",
        "_stopped",
        "finish",
        "index",
        "job",
        "num_tokens",
        "params",
        "prompt",
        "prompt_logprobs",
        "reader",
        "request_id",
        "text",
    )

    def __init__(self, job: ChoiceOwner, index: int, prompt: Prompt, params: SamplingParams, text: TextStream) -> None:
        self.job = job
        self.index = index
        self.prompt = prompt
        self.params = params
        self.text = text
        self.request_id: int | None = None
        self.num_tokens = 0
        """Tokens of the answer so far."""
        self.finish: Finish | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        form = job.generation.form
        self.reader = None if form is None else AnswerReader(form, partial(job.generation.part_id, index))
        """Finds reasoning and tool calls; None: everything is text."""
        self._push = text.push
        self._has_stop_strings = bool(params.stop)
        self._stopped = False
        self._closed = False
        """True if further tokens do not belong to the answer."""

    @abstractmethod
    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self.prompt_logprobs = logprobs

    def on_finish(self, finish: Finish) -> None:
        self.finish = finish
        try:
            self.job.on_choice_end(self, finish)
        except Exception as error:
            self.job.on_bug(error)

    @abstractmethod
    def complete(self) -> None:
        """Generation has succeeded: release the text that was held back."""

    def _last_text(self) -> str:
        """The text held back so far. The end of the text can complete a stop string."""
        if self._closed:
            return ""
        rest = self.text.finish()
        self._stopped = self.text.stopped_by is not None
        return rest

    @property
    def is_stopped(self) -> bool:
        """True if a stop string or the last permitted call ended the answer; later tokens do not belong to it."""
        return self._stopped

    def stop(self) -> None:
        self._stopped = self._closed = True
        self.job.abort_choice(self, "stop")

    @property
    def output_tokens(self) -> int:
        """The engine's count, or fewer if a stop string ended the answer earlier."""
        return self.num_tokens if self._stopped or self.finish is None else self.finish.output_tokens

    @property
    def finish_reason(self) -> AnswerFinish:
        stopped = self._stopped or (self.finish is not None and self.finish.reason == "stop")
        if not stopped or self.job.generation.score_only:
            return "length"
        return "tool_calls" if self.reader is not None and self.reader.has_called else "stop"

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.reader is None else self.reader.num_reasoning_tokens

    @property
    def stop_reason(self) -> str | int | None:
        if self._stopped:
            return self.text.stopped_by
        token_id = self.finish.stop_token_id if self.finish is not None else -1
        return token_id if token_id in self.params.stop_token_ids else None


class CollectedChoice(Choice):
    """A choice of an answer that is sent whole."""

    __slots__ = ("_add_logprobs", "_add_text", "_add_token", "output")

    def __init__(self, job: ChoiceOwner, index: int, prompt: Prompt, params: SamplingParams, text: TextStream) -> None:
        super().__init__(job, index, prompt, params, text)
        self.output = Output()
        self._add_text = self.output.parts.append
        self._add_token = self.output.token_ids.append
        self._add_logprobs = self.output.logprobs.append

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._closed:
            return
        try:
            self.num_tokens += 1
            self._add_token(token_id)
            if logprobs is not None:
                self._add_logprobs(logprobs)
            self._add_text(self._push(token_id))
            if self._has_stop_strings and self.text.stopped_by is not None:
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        self._add_text(self._last_text())


class ParsedCollectedChoice(CollectedChoice):
    """A choice with reasoning or tool calls, of an answer that is sent whole."""

    __slots__ = ()

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._closed:
            return
        try:
            reader = self.reader
            assert reader is not None
            self.num_tokens += 1
            self._add_token(token_id)
            if logprobs is not None:
                self._add_logprobs(logprobs)
            reader.count_token()
            self._add(reader.read(self._push(token_id)))
            if reader.is_full or (self._has_stop_strings and self.text.stopped_by is not None):
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        assert self.reader is not None
        self._add(self.reader.read(self._last_text()))
        self._add(self.reader.finish(is_cut=self.finish_reason == "length"))

    def _add(self, events: list[AnswerEvent]) -> None:
        for event in events:
            self.output.add(event)


class PlainChoice(Choice):
    """A choice of a stream whose frames carry only text: prefix, escaped text, suffix (the fast path)."""

    __slots__ = (
        "_fixed_bytes",
        "_held",
        "_max_direct_chars",
        "_out",
        "_prefix",
        "_suffix",
        "_suffix_line",
        "_write",
    )

    def __init__(
        self,
        job: ChoiceOwner,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        text: TextStream,
        out: EventStream,
        frame: tuple[bytes, bytes],
    ) -> None:
        super().__init__(job, index, prompt, params, text)
        self._out = out
        self._write = out.write
        self._prefix, self._suffix = frame
        self._suffix_line = self._suffix + b"\r\n"
        self._fixed_bytes = len(self._prefix) + len(self._suffix)
        # An escaped character takes at most six bytes, and the string two quotes.
        self._max_direct_chars = max(0, len(_SIZE_LINES) - self._fixed_bytes - 3) // 6
        self._held: list[str] = []

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._closed:
            return
        try:
            self.num_tokens += 1
            text = self._push(token_id)
            if text:
                if self._out.direct and len(text) <= self._max_direct_chars:
                    data = encode(text) if text.isascii() else escape_text(text)
                    size_line = _SIZE_LINES[self._fixed_bytes + len(data)]
                    self._write(b"".join((size_line, self._prefix, data, self._suffix_line)))
                else:
                    self._send(text)
            if self._has_stop_strings and self.text.stopped_by is not None:
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        rest = self._last_text()
        if rest:
            self._send(rest)

    def _send(self, text: str) -> None:
        if self._out.paused:
            self._held.append(text)
            self._out.hold(len(text))
        else:
            self._out.send(self._prefix + escape_text(text) + self._suffix)

    def take_held(self) -> bytes:
        if not self._held:
            return b""
        text = "".join(self._held)
        self._held.clear()
        return self._prefix + escape_text(text) + self._suffix


class DeltaWriter(Protocol):
    """The part of a dialect's writer that shapes single events."""

    def prompt_frame(self, choice: DetailedChoice) -> bytes:
        """Frame before a choice's output: an echoed prompt, the prompt's token ids; may be empty."""

    def text_delta(self, choice: DetailedChoice, delta: TextDelta) -> bytes: ...

    def reasoning_delta(self, choice: DetailedChoice, text: str, tokens: Tokens) -> bytes: ...

    def call_start(self, choice: DetailedChoice, call: ToolCall, tokens: Tokens) -> bytes: ...

    def call_arguments(self, choice: DetailedChoice, call: ToolCall, text: str, tokens: Tokens) -> bytes: ...

    def call_end(self, choice: DetailedChoice, call: ToolCall) -> bytes:
        """The call is complete, or broken off (`is_complete`)."""


class DetailedChoice(Choice):
    """A choice of a stream whose frames carry log-probabilities, token ids, running usage or an echo."""

    __slots__ = ("_out", "_pending_ids", "_pending_logprobs", "_started", "_writer")

    def __init__(
        self,
        job: ChoiceOwner,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        text: TextStream,
        out: FrameSink,
        writer: DeltaWriter,
    ) -> None:
        super().__init__(job, index, prompt, params, text)
        self._out = out
        self._writer = writer
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[TokenLogprobs] = []
        self._started = False

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._closed:
            return
        try:
            self._begin()
            self.num_tokens += 1
            self._pending_ids.append(token_id)
            if logprobs is not None:
                self._pending_logprobs.append(logprobs)
            text = self._push(token_id)
            if text:
                self._send(text)
            if self._has_stop_strings and self.text.stopped_by is not None:
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        self._begin()
        text, generation = self._last_text(), self.job.generation
        shows_tokens = generation.return_token_ids or generation.logprobs is not None
        if text or (self._pending_ids and shows_tokens):
            self._send(text)

    def _send(self, text: str) -> None:
        delta = TextDelta(text, self._pending_ids, self._pending_logprobs)
        self._pending_ids, self._pending_logprobs = [], []
        self._out.send(self._writer.text_delta(self, delta))

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            frame = self._writer.prompt_frame(self)
            if frame:
                self._out.send(frame)


class ParsedChoice(DetailedChoice):
    """A choice of a stream with reasoning or tool calls."""

    __slots__ = ()

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        assert self.reader is not None
        if not self._closed:
            self.reader.count_token()
        super().on_token(token_id, logprobs)
        if self.reader.is_full and not self._closed:
            self.stop()

    def complete(self) -> None:
        assert self.reader is not None
        self._begin()
        self._send(self._last_text())
        self._send_events(self.reader.finish(is_cut=self.finish_reason == "length"))
        generation = self.job.generation
        if self._pending_ids and (generation.return_token_ids or generation.logprobs is not None):
            super()._send("")

    def _send(self, text: str) -> None:
        assert self.reader is not None
        self._send_events(self.reader.read(text))

    def _send_events(self, events: list[AnswerEvent]) -> None:
        for event in events:
            tokens = Tokens(self._pending_ids, self._pending_logprobs)
            frame = self._frame(event, tokens)
            if frame:
                self._pending_ids, self._pending_logprobs = [], []
                self._out.send(frame)

    def _frame(self, event: AnswerEvent, tokens: Tokens) -> bytes:
        writer = self._writer
        if isinstance(event, TextSaid):
            return writer.text_delta(self, TextDelta(event.text, tokens.token_ids, tokens.logprobs))
        if isinstance(event, ReasoningSaid):
            return writer.reasoning_delta(self, event.text, tokens)
        if isinstance(event, CallStart):
            return writer.call_start(self, event.call, tokens)
        if isinstance(event, CallArguments):
            return writer.call_arguments(self, event.call, event.text, tokens)
        return writer.call_end(self, event.call)
