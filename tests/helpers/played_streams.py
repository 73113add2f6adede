"""CUDA streams without CUDA: what is queued on them runs later, in any order that their waits allow.

Only what copies need is played: streams, events, and `copy_` with `non_blocking`. Where code relies on an order that
nothing enforces, some seed shows it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

PLACE = SimpleNamespace(type="cuda")
"""Stands for the device."""


class Streams:
    """All streams, of which one is current. Work is a deque of callables that say whether they ran:
    a wait that is not over does not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.all: list[PlayedStream] = []
        self.current = PlayedStream(self)

    def queue(self, work: Callable[[], object]) -> None:
        self.current.queue(work)

    def select(self, stream: PlayedStream) -> None:
        self.current = stream

    def run_some(self) -> None:
        """A few pieces of work, from streams drawn at random."""
        for _ in range(self.rng.randrange(12)):
            self.run_one()

    def run_one(self) -> bool:
        waiting = [stream for stream in self.all if stream.work]
        self.rng.shuffle(waiting)
        for stream in waiting:
            if stream.work[0]() is not False:
                stream.work.popleft()
                return True
        assert not waiting, "the streams wait for each other"
        return False

    def run_until(self, event: PlayedEvent) -> None:
        while event.recorded != event.reached:
            assert self.run_one()


class PlayedStream:
    def __init__(self, streams: Streams) -> None:
        self.work: deque[Callable[[], object]] = deque()
        streams.all.append(self)

    def queue(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def query(self) -> bool:
        return not self.work

    def wait_event(self, event: PlayedEvent) -> None:
        awaited = event.recorded  # later records do not count
        self.queue(lambda: event.reached >= awaited)


class PlayedEvent:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.recorded, self.reached = streams, 0, 0

    def record(self, stream: PlayedStream | None = None) -> None:
        self.recorded += 1
        number = self.recorded
        (stream or self.streams.current).queue(lambda: self._reach(number))

    def _reach(self, number: int) -> None:
        self.reached = max(self.reached, number)

    def synchronize(self) -> None:
        self.streams.run_until(self)


@contextmanager
def played_streams(seed: int) -> Iterator[Streams]:
    streams, zeros, copy = Streams(seed), torch.zeros, Tensor.copy_

    def zeros_here(*size: int, pin_memory: bool = False, device: object = None, **options: torch.dtype) -> Tensor:
        return zeros(*size, **options)

    def copy_later(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        streams.queue(lambda: copy(target, source))
        return target

    with (
        patch("torch.zeros", zeros_here),
        patch("torch.cuda.Stream", lambda: PlayedStream(streams)),
        patch("torch.cuda.Event", lambda blocking=False: PlayedEvent(streams)),
        patch("torch.cuda.set_stream", streams.select),
        patch("torch.cuda.current_stream", lambda device=None: streams.current),
        patch.object(Tensor, "copy_", copy_later),
    ):
        yield streams
