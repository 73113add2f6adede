"""Fake CUDA streams: queued work runs later, in a random order that respects the waits on events.

Covers what copies use: streams, events, and `copy_` with `non_blocking`. Code that relies on an order that nothing
enforces fails for some seed.
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
    """All streams; one is current. Work is a deque of callables; a callable that returns False did not run because it
    waits for an event."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.all: list[FakeStream] = []
        self.current = FakeStream(self)

    def queue(self, work: Callable[[], object]) -> None:
        self.current.queue(work)

    def select(self, stream: FakeStream) -> None:
        self.current = stream

    def run_some(self) -> None:
        """Run a few pieces of work, from random streams."""
        for _ in range(self.rng.randrange(12)):
            self.run_one()

    def run_one(self) -> bool:
        waiting = [stream for stream in self.all if stream.work]
        self.rng.shuffle(waiting)
        for stream in waiting:
            if stream.work[0]() is not False:
                stream.work.popleft()
                return True
        assert not waiting, "deadlock: the streams wait for each other"
        return False

    def run_until(self, event: FakeEvent) -> None:
        while event.recorded != event.reached:
            assert self.run_one()


class FakeStream:
    def __init__(self, streams: Streams) -> None:
        self.work: deque[Callable[[], object]] = deque()
        streams.all.append(self)

    def queue(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def query(self) -> bool:
        return not self.work

    def wait_event(self, event: FakeEvent) -> None:
        awaited = event.recorded  # Later records do not count.
        self.queue(lambda: event.reached >= awaited)


class FakeEvent:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.recorded, self.reached = streams, 0, 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorded += 1
        number = self.recorded
        (stream or self.streams.current).queue(lambda: self._reach(number))

    def _reach(self, number: int) -> None:
        self.reached = max(self.reached, number)

    def synchronize(self) -> None:
        self.streams.run_until(self)


@contextmanager
def fake_streams(seed: int) -> Iterator[Streams]:
    streams, zeros, copy = Streams(seed), torch.zeros, Tensor.copy_

    def zeros_here(*size: int, pin_memory: bool = False, device: object = None, **options: torch.dtype) -> Tensor:
        return zeros(*size, **options)

    def copy_later(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        streams.queue(lambda: copy(target, source))
        return target

    with (
        patch("torch.zeros", zeros_here),
        patch("torch.cuda.Stream", lambda: FakeStream(streams)),
        patch("torch.cuda.Event", lambda blocking=False: FakeEvent(streams)),
        patch("torch.cuda.set_stream", streams.select),
        patch("torch.cuda.current_stream", lambda device=None: streams.current),
        patch.object(Tensor, "copy_", copy_later),
    ):
        yield streams
