"""Hands the tokens and ends of a step to the sinks of a front's requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from millrace.link.front.open_requests import OpenRequests
from millrace.link.messages import Abort, Finish, StepTokens, ToEngine, TokenLogprobs, unpack_ids, unpack_tokens

log = logging.getLogger(__name__)


class Delivery:
    def __init__(self, requests: OpenRequests, send: Callable[[ToEngine], None]) -> None:
        self._requests = requests
        self._send = send
        self._finish_times: deque[float] = deque(maxlen=256)

    @property
    def ends_per_s(self) -> float:
        """Rate at which the last requests ended; 1 until it is known."""
        times = self._finish_times
        return (len(times) - 1) / max(times[-1] - times[0], 1e-3) if len(times) > 1 else 1.0

    def deliver(self, step: StepTokens) -> None:
        if step.prompt_logprobs:
            self._deliver_prompt_logprobs(step.prompt_logprobs)
        ids, tokens = unpack_ids(step.ids).tolist(), unpack_tokens(step.tokens).tolist()
        if step.logprobs:
            self._deliver_with_logprobs(ids, tokens, step.logprobs)
        else:
            receivers = self._requests.receivers
            for request_id, token_id in zip(ids, tokens, strict=True):
                receiver = receivers.get(request_id)
                if receiver is not None:
                    sink, keep = receiver
                    keep(token_id)
                    try:
                        sink.on_token(token_id, None)
                    except Exception:
                        self._drop(request_id)
        if step.finished:
            now = time.monotonic()
            for finish in step.finished:
                self._finish_times.append(now)
                self._requests.end(finish)

    def _deliver_prompt_logprobs(self, by_id: dict[int, tuple[TokenLogprobs | None, ...]]) -> None:
        receivers = self._requests.receivers
        for request_id, prompt_logprobs in by_id.items():
            if request_id in receivers:
                try:
                    receivers[request_id][0].on_prompt_logprobs(prompt_logprobs)
                except Exception:
                    self._drop(request_id)

    def _deliver_with_logprobs(
        self, ids: list[int], tokens: list[int], logprobs: dict[int, tuple[TokenLogprobs, ...]]
    ) -> None:
        taken: dict[int, int] = {}
        for request_id, token_id in zip(ids, tokens, strict=True):
            receiver = self._requests.receivers.get(request_id)
            if receiver is None:
                continue
            sink, keep = receiver
            keep(token_id)
            entries = logprobs.get(request_id, ())
            index = taken.get(request_id, 0)
            taken[request_id] = index + 1
            try:
                sink.on_token(token_id, entries[index] if index < len(entries) else None)
            except Exception:
                self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        """A sink raised: end its request. Other requests of the step are not affected."""
        log.exception("the sink of request %d failed; the request is aborted", request_id)
        self._send(Abort(ids=(request_id,)))
        message = "The server failed to deliver this answer."
        self._requests.end(Finish(id=request_id, reason="error", message=message))
