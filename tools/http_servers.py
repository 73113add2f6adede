"""Compares the streaming cost of HTTP servers: `python tools/http_servers.py aiohttp-direct aiohttp uvicorn granian`.

Each server runs in its own process with the same application: a ticker sends one server-sent event per stream and tick,
as an engine's steps do. A client process holds the streams open. The figure is the server's CPU time per event. The
servers must be installed (uvicorn with uvloop and httptools); hypercorn works too.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1731600000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
TICK_S = 0.004
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Ticker:
    """Calls every stream once per tick, as the delivery of a step does."""

    def __init__(self) -> None:
        self.streams: set[Any] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            for stream in list(self.streams):
                stream(EVENT)
            await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - began)))


ticker = Ticker()


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The application for ASGI servers: one queue per stream, one `send` per event."""
    if scope["type"] != "http":
        return
    ticker.start()
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    ticker.streams.add(queue.put_nowait)
    try:
        while True:
            await send({"type": "http.response.body", "body": await queue.get(), "more_body": True})
    finally:
        ticker.streams.discard(queue.put_nowait)


def serve_aiohttp(port: int, *, direct: bool) -> None:
    import uvloop
    from aiohttp import web

    async def handle(request: web.Request) -> web.StreamResponse:
        ticker.start()
        if direct:
            transport = request.transport
            assert transport is not None
            transport.write(HEAD)
            ticker.streams.add(write := lambda event: transport.write(CHUNK))
            try:
                await asyncio.Event().wait()
            finally:
                ticker.streams.discard(write)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        ticker.streams.add(queue.put_nowait)
        while True:
            await response.write(await queue.get())

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()

    uvloop.run(main())


def serve(name: str, port: int) -> None:
    if name.startswith("aiohttp"):
        serve_aiohttp(port, direct=name.endswith("direct"))
    elif name == "uvicorn":
        import uvicorn

        uvicorn.run(asgi, port=port, log_level="warning", access_log=False, loop="uvloop", http="httptools")
    elif name == "granian":
        os.execvp("granian", ["granian", "--interface", "asgi", "--port", str(port), "--loop", "uvloop",
                              "--log-level", "warning", "http_servers:asgi"])  # fmt: skip
    elif name == "hypercorn":
        os.execvp("hypercorn", ["hypercorn", "-k", "uvloop", "-b", f"127.0.0.1:{port}", "http_servers:asgi"])
    else:
        raise SystemExit(f"Unknown server '{name}'.")


def cpu_s(pid: int) -> float:
    """CPU time of the process and its children."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(entry.name) == pid or int(fields[1]) == pid:
                total += (int(fields[11]) + int(fields[12])) / tick
    return total


class Reader(asyncio.Protocol):
    count = 0

    def connection_made(self, transport: Any) -> None:
        transport.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        Reader.count += data.count(b"data: {")


async def measure(name: str, pid: int, port: int, streams: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    transports = [(await loop.create_connection(Reader, "127.0.0.1", port))[0] for _ in range(streams)]
    await asyncio.sleep(1.0)
    began, used, count = time.monotonic(), cpu_s(pid), Reader.count
    await asyncio.sleep(seconds)
    wall_s, used, count = time.monotonic() - began, cpu_s(pid) - used, Reader.count - count
    print(f"{name:15} {streams:5} streams: {count / wall_s:9,.0f} events/s, {1e6 * used / max(1, count):6.2f} µs/event")
    for transport in transports:
        transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    os.chdir(Path(__file__).parent)
    import uvloop

    for name in args.servers:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(name, port))
        process.start()
        assert process.pid is not None
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        uvloop.run(measure(name, process.pid, port, args.streams, args.seconds))
        process.terminate()
        process.join(5)
        process.kill()


if __name__ == "__main__":
    main()
