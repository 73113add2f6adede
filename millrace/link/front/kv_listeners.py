"""Who listens to the KV events of an engine. A listener that is too slow loses its events and gets a new snapshot."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from millrace.link.messages import KV_KEY_BYTES, KvEvents

MAX_QUEUED_KEYS = 1 << 18
"""Keys that wait for one listener."""
MAX_QUEUED_EVENTS = 1 << 12
CLEARED = KvEvents("cleared", "device", b"")


class KvListener:
    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` makes the engine send a snapshot."""
        self._ask = ask
        self.queue: deque[KvEvents] = deque()
        self._num_keys = 0
        self._awaits_snapshot = True
        self._is_cleared = False
        self._changed = asyncio.Event()

    def push(self, event: KvEvents) -> None:
        is_snapshot = event.kind == "snapshot" and event.tier == "device"
        if self._is_cleared or (self._awaits_snapshot and not is_snapshot):
            return
        if is_snapshot and not self._awaits_snapshot:
            return  # For another listener. Those after it repeat what this one has.
        self._awaits_snapshot = False
        self.queue.append(event)
        self._num_keys += len(event.keys) // KV_KEY_BYTES
        if self._num_keys > MAX_QUEUED_KEYS or len(self.queue) > MAX_QUEUED_EVENTS:
            self.clear()
        self._changed.set()

    def clear(self) -> None:
        """Forget what waits: what the listener has is out of date."""
        self.queue.clear()
        self._num_keys, self._is_cleared = 0, True
        self._changed.set()

    async def next(self) -> KvEvents:
        while True:
            if self._is_cleared:
                self._is_cleared, self._awaits_snapshot = False, True
                self._ask()
                return CLEARED
            if self.queue:
                event = self.queue.popleft()
                self._num_keys -= len(event.keys) // KV_KEY_BYTES
                return event
            self._changed.clear()
            await self._changed.wait()


class KvListeners:
    def __init__(self, send: Callable[[bool], None]) -> None:
        """`send(True)` makes the engine send a snapshot and then events, `send(False)` nothing more."""
        self._send = send
        self._listeners: set[KvListener] = set()

    def add(self) -> KvListener:
        listener = KvListener(lambda: self._send(True))
        self._listeners.add(listener)
        self._send(True)
        return listener

    def remove(self, listener: KvListener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self._send(False)

    def on_events(self, event: KvEvents) -> None:
        for listener in self._listeners:
            listener.push(event)

    def on_new_engine(self) -> None:
        """Its cache is empty, and it does not know who listens."""
        for listener in self._listeners:
            listener.clear()
