"""The engine's part of a beam search: one token after each of its beams, step by step. The engine counts it as one
request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from millrace.errors import MillraceError
from millrace.link.caller import ANONYMOUS, Caller
from millrace.link.client import EngineClient
from millrace.link.messages import Finish, TokenLogprobs
from millrace.params.classes import FinishReason
from millrace.params.sampling import SamplingParams


class SearchSteps:
    def __init__(
        self,
        client: EngineClient,
        prompt: list[int],
        error_of: Callable[[Finish], MillraceError],
        *,
        priority: int = 1,
        deadline: float | None = None,
        cache_salt: str = "",
        caller: Caller = ANONYMOUS,
    ) -> None:
        """`error_of`: the error of a search one of whose steps ended like this."""
        self._client = client
        self._prompt = prompt
        self._error_of = error_of
        self._priority = priority
        self._deadline = deadline
        self._cache_salt = cache_salt
        self._caller = caller
        self._id = client.begin_search()
        self._began = time.monotonic()
        self._open: set[int] = set()
        self._first: Finish | None = None
        """Of the step that computed the prompt."""
        self._failed: Finish | None = None
        self._preemptions = 0

    async def following(self, beam: list[int], params: SamplingParams) -> TokenLogprobs:
        """The likeliest tokens after the prompt and these output tokens."""
        step = _OneToken()
        request_id = self._client.submit(
            self._prompt + beam,
            params,
            step,
            priority=self._priority,
            deadline=self._deadline,
            cache_salt=self._cache_salt,
            caller=self._caller,
            search=self._id,
        )
        self._open.add(request_id)
        try:
            finish = await step.done
        finally:
            self._open.discard(request_id)
        self._first = self._first or finish
        self._preemptions += finish.preemptions
        if finish.reason not in ("stop", "length") or step.logprobs is None:
            self._failed = self._failed or finish
            raise self._error_of(finish)
        return step.logprobs

    def abort(self) -> None:
        for request_id in tuple(self._open):
            self._client.abort(request_id)

    def end(self, reason: FinishReason | None, output_tokens: int = 0, stop_token_id: int = -1) -> Finish:
        """Tell the engine how the search ended; None: it did not succeed. Returns its terminal event."""
        self.abort()
        failed, first = self._failed, self._first
        finish = Finish(
            id=self._id,
            reason=reason or (failed.reason if failed is not None else "abort"),
            message=failed.message if failed is not None else "",
            stop_token_id=stop_token_id,
            cached_tokens=first.cached_tokens if first is not None else 0,
            prompt_tokens=len(self._prompt),
            output_tokens=output_tokens,
            preemptions=self._preemptions,
            queued_s=first.queued_s if first is not None else 0.0,
            first_token_s=first.first_token_s if first is not None else 0.0,
            total_s=time.monotonic() - self._began,
        )
        self._client.end_search(finish)
        return finish


class _OneToken:
    """Receives the one token of a step, of which only the log-probabilities count."""

    def __init__(self) -> None:
        self.logprobs: TokenLogprobs | None = None
        self.done: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.logprobs = logprobs

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        raise AssertionError("beams ask for no log-probabilities of the prompt")

    def on_finish(self, finish: Finish) -> None:
        if not self.done.done():
            self.done.set_result(finish)
