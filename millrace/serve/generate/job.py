"""One request while it generates: submits its choices and ends exactly once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from millrace.errors import (
    BadRequest,
    CacheFull,
    DeadlineExceeded,
    EngineUnavailable,
    MillraceError,
    RequestCancelled,
    RequestFailed,
)
from millrace.link.messages import Finish
from millrace.params.classes import FinishReason
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.choices import (
    Choice,
    CollectedChoice,
    DetailedChoice,
    ParsedChoice,
    ParsedCollectedChoice,
    PlainChoice,
)
from millrace.serve.generate.events import Usage
from millrace.serve.generate.fields.session import TurnSink
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.resuming.marks import FrameSink, MarkedFrames, MarkedSink, TokenSink, replay
from millrace.serve.generate.writer import Writer
from millrace.serve.http.event_stream import EventStream
from millrace.serve.state import FrontState, JobSummary
from millrace.text.answer_parser import marker_ids
from millrace.text.text_stream import TextStream

DEADLINE_SLACK_S = 2.0
"""The engine ends a request at its deadline; the front waits this much longer for the engine to report it."""

CACHE_RETRY_S = 60.0
"""What others keep cached may have expired by then."""

log = logging.getLogger("millrace.serve")


class Job:
    """Ends exactly once: `done` gets a result when everything is generated (streams: sent), or the error to answer."""

    def __init__(
        self,
        state: FrontState,
        generation: Generation,
        make_writer: Callable[[Job], Writer],
        out: EventStream | None = None,
    ) -> None:
        self.state = state
        self.generation = generation
        self.out = out
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: MillraceError | None = None
        self.submitted_at = 0.0
        self.request_id = self.path = self.owner = ""
        """X-Request-Id, path and tenant of the request."""
        self.writer = make_writer(self)
        self._num_open = 0
        self._aborted: set[int] = set()
        """Indices of choices that the engine was told to abort."""
        self._markers = marker_ids(state.tokenizer, generation.form)
        self._marked: dict[int, MarkedFrames] = {}
        """By choice, of a stream that another replica may continue."""
        self.choices: list[Choice] = []
        self._make_choices()

    # ── start ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Submit every sequence or none: if one is refused, those before it are aborted."""
        generation, client = self.generation, self.state.client
        self.begin()
        try:
            for choice in self.choices:
                marked = self._marked.get(choice.index)
                if marked is not None and self._replay(choice, marked):
                    continue
                sink: TokenSink = choice if marked is None else MarkedSink(choice, marked)
                choice.request_id = client.submit(
                    choice.prompt.token_ids,
                    choice.params,
                    sink if generation.turn is None else TurnSink(generation.turn, sink),
                    end_token_ids=self.state.tokenizer.end_token_ids,
                    priority=generation.priority,
                    deadline=generation.deadline,
                    cache_salt=generation.cache_salt,
                    retain=generation.retain if choice.index == 0 else None,
                    documents=choice.prompt.documents,
                    caller=generation.caller,
                    output=generation.received_by(choice.index).token_ids,
                )
        except MillraceError as error:
            self.close()
            raise (name_fields(error, self.writer.limit_names) if isinstance(error, BadRequest) else error) from None

    def begin(self) -> None:
        self.submitted_at = time.monotonic()
        self._num_open = len(self.choices)

    @property
    def is_started(self) -> bool:
        """True if every sequence was accepted."""
        return all(choice.request_id is not None for choice in self.choices)

    def _make_choices(self) -> None:
        generation, choices = self.generation, self.choices
        for prompt in generation.prompts:
            for number in range(generation.num_sequences):
                params = _params_of(generation.params, number)
                if self.state.adapter:
                    params = msgspec.structs.replace(params, adapter=self.state.adapter)
                if prompt.second_from or prompt.pooled_from or prompt.attended:
                    params = msgspec.structs.replace(
                        params,
                        second_from=prompt.second_from,
                        pooled_from=prompt.pooled_from,
                        attended=prompt.attended,
                    )
                choices.append(self._make_choice(len(choices), prompt, params))
        if self.out is not None:
            holders = [choice for choice in choices if isinstance(choice, PlainChoice)]
            preamble, resumable = self.writer.preamble(choices), generation.resumable
            has_begun = resumable is not None and resumable.received is not None
            self.out.begin_with(b"" if has_begun else preamble, list(holders), self.on_slow_client)

    def _make_choice(self, index: int, prompt: Prompt, params: SamplingParams) -> Choice:
        text = TextStream(self.state.tokenizer, params, self._markers)
        is_parsed = self.generation.form is not None
        if self.out is None:
            collected = ParsedCollectedChoice if is_parsed else CollectedChoice
            return collected(self, index, prompt, params, text)
        if is_parsed or self.generation.is_detailed:
            out: FrameSink = self.out
            if self.generation.resumable is not None:
                out = self._marked[index] = MarkedFrames(self.out, index, has_comments=self.out.has_comments)
            kind = ParsedChoice if is_parsed else DetailedChoice
            return kind(self, index, prompt, params, text, out, self.writer)
        return PlainChoice(self, index, prompt, params, text, self.out, self.writer.text_frame(index))

    def _replay(self, choice: Choice, marked: MarkedFrames) -> bool:
        """Bring the choice to where another replica left it. Returns True if it has ended there."""
        received, params = self.generation.received_by(choice.index), choice.params
        limit = self.state.client.output_limit(len(choice.prompt.token_ids), params)
        if len(received.token_ids) > limit:
            raise BadRequest(
                f"The answer was continued after {len(received.token_ids)} tokens, but it may have {limit}.",
                param="max_tokens",
            )
        marked.is_muted = True
        sink: TokenSink = MarkedSink(choice, marked)
        turn = self.generation.turn
        replay(sink if turn is None else TurnSink(turn, sink), choice.prompt.token_ids, received.token_ids, params)
        marked.is_muted = received.has_ended
        if not choice.is_stopped and len(received.token_ids) < limit:
            return False
        reason: FinishReason = "stop" if choice.is_stopped else "length"
        choice.request_id, num_prompt = -1, len(choice.prompt.token_ids)
        finish = Finish(-1, reason, prompt_tokens=num_prompt, output_tokens=len(received.token_ids))
        asyncio.get_running_loop().call_soon(choice.on_finish, finish)
        return True

    # ── end ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    def on_choice_end(self, choice: Choice, finish: Finish) -> None:
        """Called once per choice, however it ended."""
        if self.done.done():
            return
        if finish.reason not in ("stop", "length") and not choice.is_stopped:
            self.fail(self.error_of(finish))
            return
        choice.complete()
        if self.out is not None:
            self._marked.get(choice.index, self.out).send_last(self.writer.finish_frame(choice))
        self._num_open -= 1
        if self._num_open == 0:
            self._end_well()

    def _end_well(self) -> None:
        if self.out is not None and not self.generation.holds_end:
            self.out.end(self.writer.end_frames(self.usage()))
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: MillraceError) -> None:
        """End with an error: as a response if nothing has been sent, otherwise as the last frame of the stream."""
        if self.done.done():
            return
        self.error = error
        self.close()
        if self.out is None or not self.out.started:
            self.done.set_exception(error)
            return
        self.out.end(self.writer.error_frames(error))
        self.done.set_result(None)

    def on_bug(self, error: Exception) -> None:
        """A bug in writing one answer must not affect the other requests of the step."""
        if self.out is not None and self.out.is_gone:
            # The client disconnected between two steps; its handler is about to be cancelled.
            self.out.close()
            self.close()
            return
        log.error("A request failed while its tokens were written.", exc_info=error)
        self.fail(RequestFailed("The server failed while writing this answer; see the server's log."))

    def on_slow_client(self, unread_bytes: int) -> None:
        """The client left too much unread. Its connection is closed, which cancels the handler."""
        self.state.metrics.slow_client_drops.inc()
        log.warning("%s: dropped a client that left %d bytes unread.", self.generation.answer_id, unread_bytes)
        self.error = RequestFailed(f"The client left {unread_bytes} bytes unread.", code="slow_client")
        self.close()

    def close(self) -> None:
        """Abort every sequence that has not ended."""
        for choice in self.choices:
            self.abort_choice(choice, "abort")

    def abort_choice(self, choice: Choice, reason: FinishReason) -> None:
        """Tell the engine to end the sequence; at most once per choice."""
        if choice.request_id is not None and choice.finish is None and choice.index not in self._aborted:
            self._aborted.add(choice.index)
            self.state.client.abort(choice.request_id, reason)

    def error_of(self, finish: Finish) -> MillraceError:
        if finish.reason == "deadline":
            after = time.monotonic() - self.submitted_at
            return DeadlineExceeded(
                f"The request had not finished at its deadline, after {after:.1f} s; ask for fewer tokens or send a"
                " larger 'timeout'.",
                param="timeout",
            )
        if finish.reason == "refused":
            return BadRequest(finish.message, param=self.generation.format_field, code="invalid_schema")
        if finish.reason == "cancelled":
            return RequestCancelled(finish.message or "The request was cancelled.")
        retain = self.generation.retain
        if finish.refused and retain is not None and retain.is_required and finish.reason == "error":
            return CacheFull(finish.refused, retry_after_s=CACHE_RETRY_S)
        if finish.reason == "abort":
            return EngineUnavailable(finish.message or "The request was cancelled by the server; send it again.")
        if self.state.client.failure is not None and finish.reason != "crash":
            return EngineUnavailable(finish.message or self.state.client.failure)
        return RequestFailed(finish.message or "The engine failed on this request.")

    @property
    def finishes(self) -> dict[int, Finish]:
        """The terminal events of its sequences, by number; without those that have not ended."""
        return {choice.index: choice.finish for choice in self.choices if choice.finish is not None}

    # ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def usage(self) -> Usage:
        """A prompt counts once. Its cached tokens are those that all of its choices found in the cache."""
        generation = self.generation
        prompt_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
        output_tokens = sum(choice.output_tokens for choice in self.choices)
        per_prompt = generation.num_sequences
        cached = 0
        for first in range(0, len(self.choices), per_prompt):
            finishes = [choice.finish for choice in self.choices[first : first + per_prompt]]
            cached += min((finish.cached_tokens for finish in finishes if finish is not None), default=0)
        ends = [choice.finish for choice in self.choices if choice.finish is not None]
        return Usage(
            prompt_tokens,
            cached,
            output_tokens,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
            document_tokens=self._document_tokens(ends),
            predicted_tokens=sum(finish.predicted_tokens for finish in ends),
            predicted_accepted=sum(finish.predicted_accepted for finish in ends),
            created_tokens=max(0, max((finish.retained_tokens for finish in ends), default=0) - cached),
        )

    def _document_tokens(self, ends: list[Finish]) -> int | None:
        if all(prompt.documents is None for prompt in self.generation.prompts):
            return None
        return max((finish.placed_tokens for finish in ends), default=0)

    def summary(self) -> JobSummary:
        generation = self.generation
        return JobSummary(
            answer_id=generation.answer_id,
            model=self.state.model_name,
            request_id=self.request_id,
            path=self.path,
            owner=self.owner,
            created=generation.created,
            submitted_at=self.submitted_at,
            stream=generation.stream,
            priority=generation.priority,
            num_sequences=len(self.choices),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts),
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            awaits_engine=self.state.client.requests.is_waiting,
        )

    def comment(self) -> None:
        waits = self.state.client.requests.is_waiting and not self.done.done()
        if waits and self.out is not None and self.out.started:  # One that has not begun can still get a status.
            self.out.send_comment("the engine is being restarted; the answer goes on.")

    @property
    def is_streamed(self) -> bool:
        return self.out is not None

    def body(self) -> bytes:
        """The body of an answer that is not streamed; call it after `done`."""
        return self.writer.answer([c for c in self.choices if isinstance(c, CollectedChoice)], self.usage())

    @property
    def finish_reason(self) -> str:
        """The finish reason of the first choice, or an error code; for metrics and logs."""
        if self.error is not None:
            return self.error.code or "error"
        if any(choice.finish is None for choice in self.choices):
            return "abort"
        return self.choices[0].finish_reason


def _params_of(params: SamplingParams, number: int) -> SamplingParams:
    """Parameters of choice `number` of a prompt. The seed wraps within its range."""
    if params.seed is None or number == 0:
        return params if params.n == 1 else msgspec.structs.replace(params, n=1)
    seed = params.seed + number
    return msgspec.structs.replace(params, n=1, seed=seed if seed < 2**64 else seed - 2**64)
