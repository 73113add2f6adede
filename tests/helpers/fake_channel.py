"""The engine's end of a channel whose fronts are a script, so that a test drives an engine by `Engine.run` alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from helpers.fake_clock import FakeClock

from millrace.host import idle_memory
from millrace.link.messages import StepTokens, Stop, ToEngine, ToFront, unpack_tokens


class FakeChannel:
    """Gives an engine one batch of messages each time that it is idle, then `Stop`. An empty batch lets a wait end
    without a message. With a `clock`, waiting takes the clock's time, else a real moment."""

    def __init__(self, *batches: Sequence[ToEngine], num_fronts: int = 1, clock: FakeClock | None = None) -> None:
        self.num_fronts = num_fronts
        self.events: list[tuple[Any, ...]] = []
        """("wait", timeout_s, poll_s) and ("send", front, message), in order. Tests may add their own."""
        self._batches, self._clock = list(batches), clock

    @property
    def sent(self) -> list[tuple[int, StepTokens]]:
        """Front and message."""
        return [(event[1], event[2]) for event in self.events if event[0] == "send"]

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Of each request, in the order in which they were sent."""
        tokens: dict[int, list[int]] = {}
        for _, message in self.sent:
            ids = np.frombuffer(message.ids, np.int64).tolist()
            for request_id, token in zip(ids, unpack_tokens(message.tokens).tolist(), strict=True):
                tokens.setdefault(request_id, []).append(token)
        return tokens

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> Sequence[ToEngine]:
        self.events.append(("wait", timeout_s, poll_s))
        is_idle = timeout_s is None or timeout_s >= idle_memory.IDLE_S
        if self._clock is not None:
            self._clock.now += timeout_s or 0.0
        elif not is_idle:
            time.sleep(timeout_s)
        if not is_idle:
            return []
        return self._batches.pop(0) if self._batches else [Stop()]

    def send(self, front_index: int, message: ToFront) -> None:
        self.events.append(("send", front_index, message))

    def send_all(self, message: ToFront) -> None:
        for front in range(self.num_fronts):
            self.send(front, message)

    def close(self) -> None: ...
