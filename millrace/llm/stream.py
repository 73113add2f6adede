"""A stream of `LLM`: iterates in plain code with `for` and in asynchronous code with `async for`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from millrace.errors import EngineUnavailable, MillraceError
from millrace.llm.collector import Collector, OnPart
from millrace.llm.outputs import StreamPart

Submit = Callable[[OnPart], Coroutine[Any, Any, list[Collector]]]


def check_open(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():
        raise EngineUnavailable("This LLM is closed: its model is no longer in memory. Make a new one.")


class GenerationStream:
    """Each iteration submits the request anew. Leaving the loop early cancels it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, submit: Submit) -> None:
        self._loop = loop
        """Runs the engine's client, on its own thread."""
        self._submit = submit

    def __repr__(self) -> str:
        return "GenerationStream(iterate with `for` or `async for`; .text() waits for the whole text)"

    def text(self) -> str:
        """The whole text of the first choice."""
        return "".join(part.text for part in self if part.index == 0)

    def __iter__(self) -> Iterator[StreamPart]:
        check_open(self._loop)
        parts: queue.SimpleQueue[StreamPart | MillraceError] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(self._submit(parts.put), self._loop)
        try:
            collectors = future.result()
        except BaseException:
            future.cancel()
            raise
        num_unfinished = len(collectors)
        try:
            while num_unfinished:
                part = parts.get()
                if isinstance(part, MillraceError):
                    raise part
                num_unfinished -= part.choice is not None
                yield part
        finally:
            self._cancel(collectors)

    async def __aiter__(self) -> AsyncIterator[StreamPart]:
        check_open(self._loop)
        parts: asyncio.Queue[StreamPart | MillraceError] = asyncio.Queue()
        caller_loop = asyncio.get_running_loop()

        def on_part(part: StreamPart | MillraceError) -> None:
            with contextlib.suppress(RuntimeError):  # The caller's loop is closed.
                caller_loop.call_soon_threadsafe(parts.put_nowait, part)

        collectors = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._submit(on_part), self._loop))
        num_unfinished = len(collectors)
        try:
            while num_unfinished:
                part = await parts.get()
                if isinstance(part, MillraceError):
                    raise part
                num_unfinished -= part.choice is not None
                yield part
        finally:
            self._cancel(collectors)

    def _cancel(self, collectors: Sequence[Collector]) -> None:
        with contextlib.suppress(RuntimeError):  # The model was closed.
            for collector in collectors:
                self._loop.call_soon_threadsafe(collector.cancel)
