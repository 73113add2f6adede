"""Collects one answer of `LLM` from the engine's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.errors import BadRequest, MillraceError, RequestFailed
from millrace.link.client import EngineClient
from millrace.link.messages import Finish, TokenLogprobs
from millrace.llm.outputs import Choice, StreamPart
from millrace.params import SamplingParams
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
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._params = params
        self._on_part = on_part
        self._text = TextStream(tokenizer, params)
        self._pieces: list[str] = []
        self._request_id: int | None = None
        self.choice = Choice(index, logprobs=[] if params.logprobs is not None else None)
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.cached_tokens = 0
        self.done: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()

    def submit(self, token_ids: list[int]) -> None:
        self._request_id = self._client.submit(
            token_ids, self._params, self, end_token_ids=self._tokenizer.end_token_ids
        )

    def cancel(self) -> None:
        """Abort the request unless it has finished."""
        if self._request_id is not None and not self.done.done():
            self._client.abort(self._request_id)

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if self._text.stopped_by is not None:
            return
        self.choice.token_ids.append(token_id)
        if self.choice.logprobs is not None and logprobs is not None:
            self.choice.logprobs.append(logprobs)
        text = self._text.push(token_id)
        self._pieces.append(text)
        if self._on_part is not None:
            self._on_part(StreamPart(self.choice.index, text, token_id))
        if self._text.stopped_by is not None and self._request_id is not None:
            self._client.abort(self._request_id, "stop")

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        self.prompt_logprobs = logprobs

    def on_finish(self, finish: Finish) -> None:
        self.cached_tokens = finish.cached_tokens
        if finish.reason == "refused":
            self._fail(BadRequest(finish.message, param="grammar", code="invalid_schema"))
            return
        if finish.reason in ("error", "abort", "deadline") and self._text.stopped_by is None:
            self._fail(RequestFailed(finish.message or f"The request ended early: {finish.reason}."))
            return
        rest = self._text.finish()
        self._pieces.append(rest)
        choice = self.choice
        choice.text = "".join(self._pieces)
        stop_token = finish.stop_token_id if finish.stop_token_id >= 0 else None
        choice.stopped_by = self._text.stopped_by if self._text.stopped_by is not None else stop_token
        choice.finish_reason = "stop" if choice.stopped_by is not None else finish.reason
        if self._on_part is not None:
            self._on_part(StreamPart(choice.index, rest, choice=choice))
        if not self.done.done():
            self.done.set_result(choice)

    def _fail(self, error: MillraceError) -> None:
        if self._on_part is not None:
            self._on_part(error)
            self.done.cancel()
        elif not self.done.done():
            self.done.set_exception(error)
