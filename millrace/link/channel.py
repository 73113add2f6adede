"""The channels that carry messages between one engine and its fronts, in one process or over ZeroMQ.

Both kinds have the same two ends. The engine's end: `receive` blocks until there is something to do (idle is a
blocking wait, never a spin), `send` never blocks. The front's end lives on an asyncio loop and hands every message
to one callback there. Over ZeroMQ neither end has threads in Python: ZeroMQ's own, which need no interpreter, do the
moving, and what is left for each message are microseconds.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq

from millrace.link.messages import (
    Stop,
    ToEngine,
    ToFront,
    decode_to_engine,
    decode_to_front,
    encode,
)

ABSENT_RETRY_S = 0.02
CLOSE_GRACE_S = 1.0
"""How long the last words of an engine are kept for a front that is not connected."""
MOST_FOR_ABSENT = 4096
"""Messages kept for a front that is not connected; beyond it the oldest go. A front that comes back asks anew."""

MOST_AT_ONCE = 32
"""Messages that a front handles before its loop turns."""

OnMessage = Callable[[ToFront], None]


class EngineChannel(Protocol):
    """The engine's end."""

    num_fronts: int

    def receive(self, timeout_s: float | None, watch_s: float = 0.0) -> list[ToEngine]:
        """Everything that has arrived; waits up to `timeout_s` (None: for ever, 0: not at all) for the first. The
        first `watch_s` of that are spent awake, where that takes nothing from those who send."""

    def send(self, front_index: int, message: ToFront) -> None: ...

    def close(self) -> None: ...


class FrontChannel(Protocol):
    """A front's end."""

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        """Deliver every message to `on_message` on `loop`, from now until `close`."""

    def send(self, message: ToEngine) -> None: ...

    def close(self) -> None: ...


class Inbox:
    """A queue that is drained whole."""

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
    """Both ends in one process; messages are passed as they are."""

    num_fronts = 1

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._front = InProcessFront(self._inbox)

    @property
    def front(self) -> InProcessFront:
        return self._front

    def receive(self, timeout_s: float | None, watch_s: float = 0.0) -> list[ToEngine]:
        return self._inbox.drain(timeout_s)

    def send(self, front_index: int, message: ToFront) -> None:
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
        """Waking a loop from another thread while it closes can abort the process, so nothing is sent from here on."""
        with self._lock:
            self._closed = True


def inbox_address(directory: str) -> str:
    return f"ipc://{directory}/engine"


def front_address(directory: str, front_index: int) -> str:
    return f"ipc://{directory}/front-{front_index}"


class ZmqEngineChannel:
    """The engine's end over Unix sockets in `directory`: one PULL for all fronts, one PUSH for each.

    Used by the engine's thread alone. A thread of its own for each direction would have to win the interpreter from
    a busy loop for every message, which takes milliseconds; a message takes microseconds.
    """

    def __init__(self, directory: str, num_fronts: int) -> None:
        self.num_fronts = num_fronts
        self._address = inbox_address(directory)
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._pull.linger = 0
        self._pull.bind(self._address)
        self._pushes = []
        self._absent: list[deque[bytes]] = [deque(maxlen=MOST_FOR_ABSENT) for _ in range(num_fronts)]
        for index in range(num_fronts):
            push = self._context.socket(zmq.PUSH)
            push.set_hwm(0)
            push.linger = 1000
            push.bind(front_address(directory, index))
            self._pushes.append(push)

    def receive(self, timeout_s: float | None, watch_s: float = 0.0) -> list[ToEngine]:
        messages = self._take()
        if messages or (timeout_s is not None and timeout_s <= 0):
            return messages
        start = time.monotonic()
        end = start + timeout_s if timeout_s is not None else math.inf
        awake_until = min(start + watch_s, end)
        while not messages and time.monotonic() < awake_until:
            messages = self._take()
        while not messages and (left_s := end - time.monotonic()) > 0:
            # While something waits for a front that is not there, it is tried again and again.
            patience_s = min(left_s, ABSENT_RETRY_S) if any(self._absent) else left_s
            self._pull.poll(None if patience_s == math.inf else math.ceil(1000 * patience_s))
            self._retry_absent()
            messages = self._take()
        return messages

    def _take(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            while True:
                messages.append(decode_to_engine(self._pull.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages

    def send(self, front_index: int, message: ToFront) -> None:
        """A front that is not there (yet, or any more) must not hold up the others: what is for it waits aside."""
        data, absent = encode(message), self._absent[front_index]
        if absent:
            absent.append(data)
            self._retry(front_index)
            return
        try:
            self._pushes[front_index].send(data, zmq.NOBLOCK)
        except zmq.Again:
            absent.append(data)

    def _retry_absent(self) -> None:
        for front_index, absent in enumerate(self._absent):
            if absent:
                self._retry(front_index)

    def _retry(self, front_index: int) -> None:
        absent = self._absent[front_index]
        try:
            while absent:
                self._pushes[front_index].send(absent[0], zmq.NOBLOCK)
                absent.popleft()
        except zmq.Again:
            pass

    def request_stop(self) -> None:
        """Wake the engine from another thread of its own process, as when the parent has gone."""
        with self._context.socket(zmq.PUSH) as push:
            push.linger = 1000
            push.connect(self._address)
            push.send(encode(Stop()))

    def close(self) -> None:
        end = time.monotonic() + CLOSE_GRACE_S
        while any(self._absent) and time.monotonic() < end:
            time.sleep(ABSENT_RETRY_S)
            self._retry_absent()
        for socket in (self._pull, *self._pushes):
            socket.close()
        self._context.term()


class ZmqFrontChannel:
    """A front's end over Unix sockets, wholly on its loop: a thread that received would fight the loop for the
    interpreter at every write, and a step's message takes microseconds to decode."""

    def __init__(self, directory: str, front_index: int) -> None:
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.set_hwm(0)
        self._push.linger = 200
        self._push.connect(inbox_address(directory))
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._pull.linger = 0
        self._pull.connect(front_address(directory, front_index))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage | None = None

    def start(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        self._loop, self._on_message = loop, on_message
        loop.add_reader(self._pull.fileno(), self._receive)
        loop.call_soon(self._receive)

    def _receive(self) -> None:
        """The descriptor tells of changes only, so everything is taken; a lot of it in turns with the loop's work."""
        if self._on_message is None or self._loop is None:
            return
        for _ in range(MOST_AT_ONCE):
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(decode_to_front(data))
            if self._on_message is None:
                return  # Closed by what the message brought about.
        self._loop.call_soon(self._receive)

    def send(self, message: ToEngine) -> None:
        self._push.send(encode(message))

    def close(self) -> None:
        if self._loop is not None and self._on_message is not None:
            self._on_message = None
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pull.fileno())
        self._pull.close(0)
        self._push.close()
        self._context.term()
