"""One choice of one answer: the sink that the engine's tokens fall into.

`on_token` runs once per token and is the front's hottest line: detokenise, escape, write. It never raises, because it
runs inside the dispatch of a step that also carries the tokens of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import msgspec

from millrace.link.messages import Finish, TokenLogprobs
from millrace.params import SamplingParams
from millrace.serve.generate.generation import Prompt
from millrace.serve.http.event_stream import EventStream
from millrace.serve.openai.answers import FinishWord
from millrace.text.text_stream import TextStream

if TYPE_CHECKING:
    from millrace.serve.generate.job import Job

_encode = msgspec.json.Encoder().encode

_SIZE_LINES = tuple(b"%x\r\n" % size for size in range(4096))
"""The first line of an HTTP chunk, by the chunk's size; looking it up beats formatting it."""


def escaped(text: str) -> bytes:
    """A text as a JSON string that is safe inside a line of a stream."""
    data = _encode(text)
    return data if text.isascii() else escape_lines(data)


def escape_lines(json: bytes) -> bytes:
    """Escape the three line breaks that JSON leaves alone: a client that cuts a stream into lines by Unicode's rules,
    not by those of server-sent events, would cut a frame at them."""
    return (
        json.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


class Choice(ABC):
    """What every choice keeps. Subclasses say what happens to a token."""

    __slots__ = (
        "_closed",
        "_push",
        "_stopped",
        "_watches",
        "finish",
        "index",
        "job",
        "num_tokens",
        "params",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "text",
    )

    def __init__(self, job: Job, index: int, prompt: Prompt, params: SamplingParams, text: TextStream) -> None:
        self.job = job
        self.index = index
        self.prompt = prompt
        self.params = params
        self.text = text
        self.request_id: int | None = None
        self.num_tokens = 0
        """Tokens that belong to the answer, so far."""
        self.finish: Finish | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._push = text.push
        self._watches = bool(params.stop)
        self._stopped = False
        self._closed = job.generation.score_only
        """Further tokens are not part of the answer."""

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
        """Generation has ended well: let the rest of the text go."""

    def _last_text(self) -> str:
        """The held-back rest. The end of the text can itself complete a stop string."""
        if self._closed:
            return ""
        rest = self.text.finish()
        self._stopped = self.text.stopped_by is not None
        return rest

    @property
    def is_stopped(self) -> bool:
        """A stop string was found; whatever the engine had under way beyond it is not part of the answer."""
        return self._stopped

    def stop(self) -> None:
        self._stopped = self._closed = True
        self.job.abort_choice(self, "stop")

    @property
    def completion_tokens(self) -> int:
        """As the engine counted them, unless a stop string cut the answer short of that."""
        if self.job.generation.score_only:
            return 0
        return self.num_tokens if self._stopped or self.finish is None else self.finish.output_tokens

    @property
    def finish_word(self) -> FinishWord:
        stopped = self._stopped or (self.finish is not None and self.finish.reason == "stop")
        return "stop" if stopped and not self.job.generation.score_only else "length"

    @property
    def stop_reason(self) -> str | int | None:
        if self._stopped:
            return self.text.stopped_by
        token_id = self.finish.stop_token_id if self.finish is not None else -1
        return token_id if token_id in self.params.stop_token_ids else None


class CollectedChoice(Choice):
    """A choice of an answer that is sent whole."""

    __slots__ = ("_parts", "logprobs", "token_ids")

    def __init__(self, job: Job, index: int, prompt: Prompt, params: SamplingParams, text: TextStream) -> None:
        super().__init__(job, index, prompt, params, text)
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._closed:
            return
        try:
            self.num_tokens += 1
            self.token_ids.append(token_id)
            if logprobs is not None:
                self.logprobs.append(logprobs)
            self._parts.append(self._push(token_id))
            if self._watches and self.text.stopped_by is not None:
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        self._parts.append(self._last_text())

    @property
    def answer_text(self) -> str:
        return "".join(self._parts)

    @property
    def mean_logprob(self) -> float:
        """Per token; what `best_of` ranks by."""
        if not self.logprobs:
            return 0.0
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)


class PlainChoice(Choice):
    """A choice of a stream whose chunks carry text and nothing else: prefix, escaped text, suffix."""

    __slots__ = (
        "_fixed_bytes",
        "_held",
        "_most_chars",
        "_out",
        "_prefix",
        "_protocol",
        "_suffix",
        "_suffix_line",
        "_write",
    )

    def __init__(
        self,
        job: Job,
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
        self._protocol = out.protocol
        self._prefix, self._suffix = frame
        self._suffix_line = self._suffix + b"\r\n"
        self._fixed_bytes = len(self._prefix) + len(self._suffix)
        # An escape takes at most six bytes a character, and the string its two quotes.
        self._most_chars = max(0, len(_SIZE_LINES) - self._fixed_bytes - 3) // 6
        self._held: list[str] = []

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._closed:
            return
        try:
            self.num_tokens += 1
            text = self._push(token_id)
            if text:
                if self._out.direct and len(text) <= self._most_chars:
                    data = _encode(text) if text.isascii() else escaped(text)
                    size_line = _SIZE_LINES[self._fixed_bytes + len(data)]
                    self._write(b"".join((size_line, self._prefix, data, self._suffix_line)))
                    if self._protocol._paused:
                        self._out.check_pause()
                else:
                    self._show(text)
            if self._watches and self.text.stopped_by is not None:
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        rest = self._last_text()
        if rest:
            self._show(rest)

    def _show(self, text: str) -> None:
        if self._out.paused:
            self._held.append(text)
            self._out.hold(len(text))
        else:
            self._out.send(self._prefix + escaped(text) + self._suffix)

    def take_held(self) -> bytes:
        if not self._held:
            return b""
        text = "".join(self._held)
        self._held.clear()
        return self._prefix + escaped(text) + self._suffix


class DetailedFrames(Protocol):
    """Builds the chunks of a stream that carry more than text."""

    def prompt_chunk(self, choice: DetailedChoice) -> bytes:
        """What precedes a choice's output: an echoed prompt, the prompt's token ids."""

    def chunk(self, choice: DetailedChoice, text: str) -> bytes:
        """Text with the tokens of `choice.take_pending()`."""


class DetailedChoice(Choice):
    """A choice of a stream whose chunks carry log-probabilities, token ids, running usage or an echo."""

    __slots__ = ("_frames", "_out", "_pending_ids", "_pending_logprobs", "_started")

    def __init__(
        self,
        job: Job,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        text: TextStream,
        out: EventStream,
        frames: DetailedFrames,
    ) -> None:
        super().__init__(job, index, prompt, params, text)
        self._out = out
        self._frames = frames
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
                self._out.send(self._frames.chunk(self, text))
            if self._watches and self.text.stopped_by is not None:
                self.stop()
        except Exception as error:
            self.job.on_bug(error)

    def complete(self) -> None:
        self._begin()
        text = self._last_text()
        if text or self._pending_ids:
            self._out.send(self._frames.chunk(self, text))

    def take_pending(self) -> tuple[list[int], list[TokenLogprobs]]:
        """The tokens behind the next chunk, and their log-probabilities."""
        taken = self._pending_ids, self._pending_logprobs
        self._pending_ids, self._pending_logprobs = [], []
        return taken

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            frame = self._frames.prompt_chunk(self)
            if frame:
                self._out.send(frame)
