"""A proxy between an agent and the server that keeps every request and every answer, byte for byte."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, web

NOT_PASSED_ON = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}
"""Headers of one connection."""


@dataclass
class Exchange:
    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    body: Any
    """Decoded JSON, or None."""
    status: int = 0
    """0 if the server did not answer."""
    is_stream: bool = False
    answer: bytes = b""
    was_left: bool = False
    """True if the agent closed the connection before the answer ended."""
    first_byte_s: float = 0.0
    took_s: float = 0.0


@dataclass
class WireLog:
    """`async with WireLog(url) as log:` listens on `log.url`."""

    upstream: str
    change: Callable[[str, Any], Any] = lambda path, body: body
    """Makes the body that the server gets of the one that the agent sent to this path."""
    exchanges: list[Exchange] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        self._session = ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False)
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        exchange = Exchange(request.method, request.path, dict(request.headers), _decoded(data))
        self.exchanges.append(exchange)
        if exchange.body is not None:
            data = json.dumps(self.change(request.path, exchange.body)).encode()
        began = time.monotonic()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED_ON}
        try:
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=data, headers=headers
            ) as answer:
                exchange.status = answer.status
                exchange.is_stream = answer.content_type == "text/event-stream"
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON}
                response = web.StreamResponse(status=answer.status, headers=passed)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    exchange.first_byte_s = exchange.first_byte_s or time.monotonic() - began
                    exchange.answer += piece
                    await response.write(piece)
                await response.write_eof()
                return response
        except ClientError as error:
            return web.json_response({"error": {"message": f"The proxy lost the server: {error}"}}, status=502)
        except BaseException:  # The agent left: aiohttp cancels this handler, or a write fails.
            exchange.was_left = True
            raise
        finally:
            exchange.took_s = time.monotonic() - began

    def write(self, path: Path) -> None:
        """One JSON line per exchange."""
        with path.open("w", encoding="utf-8") as file:
            for one in self.exchanges:
                file.write(json.dumps({**vars(one), "answer": one.answer.decode("utf-8", "replace")}) + "\n")


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except ValueError:
        return None
