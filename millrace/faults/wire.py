"""A raw HTTP client on sockets: it can send requests that client libraries refuse to send."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from millrace.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    model: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse `url` and ask the server for its model name."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise BenchError(f"'{url}' is not a server URL. Example: http://127.0.0.1:8000")
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = json.loads(answer.read())["data"][0]["id"]
        return cls(parts.hostname, parts.port or 80, str(model))


def post_bytes(path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + body


def completion(address: Address, **fields: Any) -> bytes:
    body = {"model": address.model, "prompt": "Once upon a time", "max_tokens": 16, "stream": True, **fields}
    return post_bytes("/v1/completions", json.dumps(body).encode())


async def exchange(address: Address, data: bytes, limit_s: float) -> tuple[int, bytes]:
    """Send bytes and read one whole answer: status and body. Status 0 if the server closed without answering."""
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            writer.write(data)
            return await read_answer(reader)
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One whole answer, chunked or with a content length, so that an open connection does not delay the end. Status 0
    if the connection ended before the head; IncompleteReadError if it ended later."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b""
    found = re.match(rb"HTTP/1\.[01] (\d+)", head)
    status = int(found[1]) if found else 0
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    if length:
        return status, await reader.readexactly(int(length[1]))
    pieces = []
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip() or b"0", 16)
        pieces.append((await reader.readexactly(size + 2))[:-2])
        if size == 0:
            return status, b"".join(pieces)
