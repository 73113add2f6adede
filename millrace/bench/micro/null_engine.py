"""An engine without a model, for measuring fronts: one token per running request and step, from a fixed sequence.

It speaks the engine's side of the real channel.
"""

from __future__ import annotations

import time
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np

from millrace.link.engine_end import SocketEngineChannel
from millrace.link.engine_stats import EngineStats
from millrace.link.messages import FRONT_SHIFT, Abort, EngineReady, Finish, Hello, NewRequest, StepTokens, Stop

STATS_EVERY_S = 0.25
NUM_TOKENS = 4099
"""Length of the sequence of token ids; a prime, so that streams do not align."""


class NullEngine:
    """Running requests as columns: ids, remaining tokens, position in the sequence."""

    def __init__(self, directory: str, num_fronts: int, vocab_size: int, step_s: float) -> None:
        self._channel = SocketEngineChannel(directory, num_fronts)
        self._step_s = step_s
        self._words = np.random.default_rng(0).integers(20, vocab_size, NUM_TOKENS).astype("<i4")
        self._ids = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)
        self._at = np.zeros(0, np.int64)
        self._outputs: dict[int, int] = {}
        self._step_no = 0
        self._stats_at = 0.0
        self._ready = EngineReady("null", 8192, vocab_size, 1 << 30, 16, "none", "null", {}, "fp_null")
        for front in range(num_fronts):
            self._channel.send(front, self._ready)

    def run(self, num_tokens: Synchronized[int]) -> None:
        while self._take_messages():
            began = time.monotonic()
            self._step()
            num_tokens.value += len(self._ids)
            self._drop_ended()
            pause_s = self._step_s - (time.monotonic() - began)
            if pause_s > 0:
                time.sleep(pause_s)
        self._channel.close()

    def _take_messages(self) -> bool:
        new: list[NewRequest] = []
        for message in self._channel.receive(None if len(self._ids) == 0 else 0.0):
            if isinstance(message, NewRequest):
                new.append(message)
            elif isinstance(message, Abort):
                self._keep(~np.isin(self._ids, message.ids))
            elif isinstance(message, Hello):
                self._channel.send(message.front, self._ready)
            elif isinstance(message, Stop):
                return False
        if new:
            self._outputs.update({message.id: message.params.max_tokens or 1 for message in new})
            self._ids = np.append(self._ids, [message.id for message in new])
            self._left = np.append(self._left, [message.params.max_tokens or 1 for message in new])
            self._at = np.append(self._at, [message.id * 31 % NUM_TOKENS for message in new])
        return True

    def _step(self) -> None:
        if len(self._ids) == 0:
            return
        self._step_no += 1
        self._left -= 1
        self._at = (self._at + 1) % NUM_TOKENS
        tokens = self._words[self._at]
        finished = [
            Finish(request_id, "length", prompt_tokens=8, output_tokens=self._outputs.pop(request_id))
            for request_id in self._ids[self._left == 0].tolist()
        ]
        fronts, stats = self._ids >> FRONT_SHIFT, self._stats_if_due()
        for front in range(self._channel.num_fronts):
            mine = fronts == front
            own = tuple(finish for finish in finished if finish.id >> FRONT_SHIFT == front)
            ids = self._ids[mine]
            if len(ids):
                message = StepTokens(self._step_no, ids.tobytes(), tokens[mine].tobytes(), own, stats=stats)
                self._channel.send(front, message)

    def _stats_if_due(self) -> EngineStats | None:
        now = time.monotonic()
        if now - self._stats_at < STATS_EVERY_S:
            return None
        self._stats_at = now
        return EngineStats(self._step_no, len(self._ids), 0, 1, 1, 0, 0, 0, 0, 0, 0, 0.0, 0.0, rows_free=1 << 20)

    def _drop_ended(self) -> None:
        if (self._left == 0).any():
            self._keep(self._left > 0)

    def _keep(self, rows: Any) -> None:
        self._ids, self._left, self._at = self._ids[rows], self._left[rows], self._at[rows]


def serve_null_engine(
    directory: str, num_fronts: int, vocab_size: int, step_s: float, num_tokens: Synchronized[int]
) -> None:
    NullEngine(directory, num_fronts, vocab_size, step_s).run(num_tokens)
