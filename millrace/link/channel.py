"""The channel between an engine and its fronts: the interface of both ends, and a channel within one process.

At the engine's end, `receive` blocks until a message arrives and `send` never blocks. The front's end lives on an
asyncio loop and passes every message to a callback there. Between processes, the ends are
`engine_end.SocketEngineChannel` and `front_end.SocketFrontChannel`, which use no threads of their own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from millrace.link.messages import ToEngine, ToFront

OnMessage = Callable[[ToFront], None]


class EngineChannel(Protocol):
    """The engine's end."""

    num_fronts: int

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> list[ToEngine]:
        """All messages that have arrived. Waits up to `timeout_s` (None = no limit, 0 = not at all) for the first.

        For the first `poll_s` seconds it polls instead of blocking, if the senders are other processes.
        """

    def send(self, front_index: int, message: ToFront) -> None: ...

    def send_all(self, message: ToFront) -> None:
        """Send the same message to every front."""

    def close(self) -> None: ...


class FrontChannel(Protocol):
    """A front's end."""

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        """Deliver every message to `on_message` on `loop`, until `close`."""

    def send(self, message: ToEngine) -> None: ...

    def close(self) -> None: ...


class NoEngine:
    """A front's end for a model that is not loaded: what is sent is dropped."""

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        pass

    def send(self, message: ToEngine) -> None:
        pass

    def close(self) -> None:
        pass


class Inbox:
    """A queue from which all messages are taken at once."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def put(self, message: ToEngine) -> None:
        self._queue.put(message)

    def drain(self, timeout_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if timeout_s is None or timeout_s > 0:
            try:
                messages.append(self._queue.get(timeout=timeout_s))
            except queue.Empty:
                return messages
        while True:
            try:
                messages.append(self._queue.get_nowait())
            except queue.Empty:
                return messages


class InProcessLink:
    """Both ends in one process. Messages are passed as objects."""

    num_fronts = 1

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._front = InProcessFront(self._inbox)

    @property
    def front(self) -> InProcessFront:
        return self._front

    def receive(self, timeout_s: float | None, poll_s: float = 0.0) -> list[ToEngine]:
        return self._inbox.drain(timeout_s)

    def send(self, front_index: int, message: ToFront) -> None:
        self._front.deliver(message)

    def send_all(self, message: ToFront) -> None:
        self._front.deliver(message)

    def close(self) -> None:
        pass


class InProcessFront:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self._early: list[ToFront] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage | None = None
        self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        with self._lock:
            self._loop, self._on_message = loop, on_message
            for message in self._early:
                loop.call_soon_threadsafe(on_message, message)
            self._early.clear()

    def deliver(self, message: ToFront) -> None:
        with self._lock:
            if self._closed:
                return
            if self._loop is None or self._on_message is None:
                self._early.append(message)
            else:
                self._loop.call_soon_threadsafe(self._on_message, message)

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        """Stop delivering: waking a loop from another thread while it closes can abort the process."""
        with self._lock:
            self._closed = True
