"""A TCP proxy that delays, drops and corrupts what a replica answers, on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal["", "delay", "drop", "corrupt", "silence"]
_READ_BYTES = 1 << 16
_GARBAGE = b"\xff\x00\xfe"


@dataclass
class FaultyProxy:
    """Passes connections on to a server. A fault concerns what the server sends while it is set."""

    host: str
    port: int
    fault: Fault = ""
    delay_s: float = 0.2
    num_faults: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """The URL under which it listens."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            inner_reader, inner_writer = await asyncio.open_connection(self.host, self.port)
            try:
                forth = asyncio.ensure_future(_copy(reader, inner_writer))
                back = asyncio.ensure_future(self._copy_back(inner_reader, writer))
                try:
                    await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in (forth, back):
                        one.cancel()
                    await asyncio.gather(forth, back, return_exceptions=True)
            finally:
                inner_writer.transport.abort()
        except OSError:
            pass  # The server is away: the client sees its connection end.
        except asyncio.CancelledError:
            pass  # The drill ends; asyncio's streams would print the cancellation of their callback.
        finally:
            self._connections.discard(task)
            writer.transport.abort() if self.fault else writer.close()

    async def _copy_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            if self.fault:
                self.num_faults += 1
            if self.fault == "delay":
                await asyncio.sleep(self.delay_s)
            elif self.fault == "drop":
                writer.write(data[: len(data) // 2])
                await writer.drain()
                return
            elif self.fault == "corrupt":
                data = _GARBAGE + data[len(_GARBAGE) :]
            while self.fault == "silence":
                await asyncio.sleep(0.01)
            writer.write(data)
            await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
