"""The open requests of a front. When their engine dies they wait for the next one, which goes on where it stopped.

What is kept of a request are its message and the tokens that came back. Text, stop strings and tool calls are the
sink's and stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from millrace.link.messages import Finish, NewRequest, Resumption, TokenLogprobs, pack_tokens, unpack_tokens
from millrace.params.classes import FinishReason

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
"""Of a token in `NewRequest.prompt`."""
MAX_LOSSES = 2
"""A request that was open when so many engines died may have killed them, and is not tried again."""
MAX_WAITS = 5
"""An engine that says that it loads is waited for so many times as long as one that says nothing."""
CHECK_S = 0.25
"""Interval at which waiting requests are held to their limits on time."""


class RequestSink(Protocol):
    """Callbacks for one request. `on_finish` is called exactly once, last."""

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None: ...

    def on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs | None, ...]) -> None: ...

    def on_finish(self, finish: Finish) -> None: ...


class OpenRequest:
    __slots__ = ("aborted", "first_token", "losses", "lost_at", "message", "output")

    def __init__(self, message: NewRequest) -> None:
        self.message = message
        """The first one that was sent."""
        before = message.resumed
        self.output: list[int] = [] if before is None else unpack_tokens(before.output).tolist()
        """Tokens that came back, after those that it came with."""
        self.first_token = 0.0 if before is None else before.first_token
        """When the first of them came, on `time.monotonic`."""
        self.aborted: FinishReason | None = None
        """Why the engine was told to end it."""
        self.losses = 0
        """Engines that died while it was open."""
        self.lost_at: float | None = None
        """While it waits for the next engine: since when."""

    def for_next_engine(self) -> NewRequest:
        if not self.losses:
            return self.message
        lost = self.lost_at or time.monotonic()  # An engine may retire before it takes the request over.
        resumed = Resumption(pack_tokens(self.output), self.first_token, lost, self.losses)
        return msgspec.structs.replace(self.message, resumed=resumed)

    def finish(self, reason: FinishReason, message: str = "") -> Finish:
        """Its terminal event if no engine sends one."""
        return Finish(
            id=self.message.id,
            reason=reason,
            message=message,
            prompt_tokens=len(self.message.prompt) // TOKEN_BYTES,
            output_tokens=len(self.output),
            first_token_s=self.first_token - self.message.arrival if self.output else 0.0,
            total_s=time.monotonic() - self.message.arrival,
        )


class OpenRequests:
    def __init__(self, resume_s: float) -> None:
        """`resume_s`: how long a request waits for the next engine; 0: it ends with the engine."""
        self._resume_s = resume_s
        self.by_id: dict[int, OpenRequest] = {}
        self.receivers: dict[int, tuple[RequestSink, Callable[[int], None]]] = {}
        """The sink of each request, and what keeps its next token: the work per token is a lookup and a call."""
        self.num_steps = 0
        """Those that are steps of searches."""
        self.is_waiting = False
        """True from the death of an engine until the next one is ready, if requests wait for that."""
        self.num_resumed = 0
        self.num_given_up = 0
        """Requests that ended with an error because their engine had died."""
        self.progress_at = 0.0
        """When the next engine last said that it is loading."""
        self._why = ""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting())

    def waiting(self) -> list[NewRequest]:
        """Those that wait for the next engine, as they were sent to the last one."""
        if not self.is_waiting:
            return []
        return [one.message for one in self.by_id.values() if one.lost_at is not None]

    def add(self, message: NewRequest, sink: RequestSink) -> None:
        one = self.by_id[message.id] = OpenRequest(message)
        self.receivers[message.id] = sink, partial(self._keep_first, one, sink)
        self.num_steps += message.search is not None
        if self.is_waiting:
            one.lost_at = time.monotonic()

    def _keep_first(self, one: OpenRequest, sink: RequestSink, token_id: int) -> None:
        one.first_token = one.first_token or time.monotonic()
        one.output.append(token_id)
        self.receivers[one.message.id] = sink, one.output.append

    def end(self, finish: Finish) -> None:
        """Unknown ids are ignored."""
        one = self.by_id.pop(finish.id, None)
        if one is None:
            return
        sink, _ = self.receivers.pop(finish.id)
        self.num_steps -= one.message.search is not None
        self.num_given_up += one.lost_at is not None and finish.reason in ("error", "crash")
        try:
            sink.on_finish(finish)
        except Exception:
            log.exception("the sink of request %d failed in on_finish", finish.id)

    def end_all(self, message: str) -> None:
        for one in list(self.by_id.values()):
            self.end(one.finish(one.aborted or "error", message))
        self._stop_waiting()

    def lose(self, why: str, *, was_ready: bool) -> None:
        """The engine has died. `was_ready`: it had started, so it may have died of one of the requests."""
        now, self._why = time.monotonic(), why
        for one in list(self.by_id.values()):
            one.losses += was_ready
            one.lost_at = one.lost_at or now
            if one.aborted is not None:
                self.end(one.finish(one.aborted))
            elif not self._resume_s:
                self.end(one.finish("error", why))
            elif one.losses >= MAX_LOSSES:
                self.end(one.finish("crash", _crashed(why)))
        if self._resume_s:
            self.is_waiting = True
            self._check()

    def for_next_engine(self) -> list[NewRequest]:
        """What the next engine is sent. Requests that were aborted end."""
        for one in list(self.by_id.values()):
            if one.aborted is not None:
                self.end(one.finish(one.aborted))
        return [one.for_next_engine() for one in self.by_id.values()]

    def resume(self) -> None:
        """The next engine is ready. It has been sent all requests."""
        num_resumed = sum(one.lost_at is not None and one.losses > 0 for one in self.by_id.values())
        self.num_resumed += num_resumed
        if num_resumed:
            log.info("the new engine continues %d requests of the one that died", num_resumed)
        for one in self.by_id.values():
            one.lost_at = None
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self.is_waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """End the requests that have waited too long, now and then again."""
        now = time.monotonic()
        for one in list(self.by_id.values()):
            deadline, lost_at = one.message.deadline, one.lost_at or now
            if deadline is not None and now >= deadline:
                self.end(one.finish("deadline"))
            elif late := self.late(now, lost_at):
                self.end(one.finish("error", f"{self._why} {late}"))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def note_loading(self) -> None:
        """The next engine is being loaded and says so."""
        self.progress_at = time.monotonic()

    def late(self, now: float, lost_at: float) -> str:
        """Why a request that lost its engine then waits no longer; empty if it does."""
        limit_s = self._resume_s
        if now - max(lost_at, self.progress_at) >= limit_s:
            if self.progress_at <= lost_at:
                return f"No engine was ready within {limit_s:g} s."
            return f"The next engine has shown no progress for {limit_s:g} s."
        is_late = now - lost_at >= MAX_WAITS * limit_s
        return f"No engine was ready within {MAX_WAITS * limit_s:g} s." if is_late else ""


def _crashed(why: str) -> str:
    return f"The engine died {MAX_LOSSES} times while it computed this request, so it is not tried again. {why}"
