"""HTTP for tests, close to the wire: nothing is retried, repaired or hidden."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have exactly OpenAI's four fields and a readable message."""
        assert self.status >= 400, self.body
        assert self.headers["content-type"].startswith("application/json"), self.headers
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(error["message"]) > 15
        assert isinstance(error["type"], str)
        return dict(error)


def request(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    timeout: float = 60.0,
) -> Reply:
    """One request on a new connection. A body that is not bytes is sent as JSON."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body, ensure_ascii=False).encode()
        headers = {**JSON, **(headers or {})}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        return Reply(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())


def post(port: int, path: str, body: Any, headers: dict[str, str] | None = None, **options: Any) -> Reply:
    return request(port, "POST", path, body, headers, **options)


def get(port: int, path: str, **options: Any) -> Reply:
    return request(port, "GET", path, **options)


def events(reply: Reply) -> list[dict[str, Any]]:
    """A stream's events, which must be well formed and end with [DONE]."""
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    # Splitting at Unicode's line breaks, as some clients do, must find the same frames.
    text = reply.body.decode("utf-8")
    assert text.splitlines() == text.split("\n")[:-1]
    frames = text.split("\n\n")
    assert frames[-1] == ""
    assert frames[-2] == "data: [DONE]"
    for frame in frames[:-1]:
        assert frame.startswith(("data: ", ": ")), frame  # the second is a comment
        assert "\n" not in frame
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2] if frame.startswith("data: ")]


def stream(port: int, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return events(post(port, path, {**body, "stream": True}, **options))


def chat_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def completion_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


@contextmanager
def connected(port: int, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    sock = socket.socket()
    try:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", port))
        yield sock
    finally:
        sock.close()


def raw_post(path: str, body: Any, *, version: str = "HTTP/1.1", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} {version}\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return (head + headers + "\r\n").encode() + data


def read_all(sock: socket.socket) -> bytes:
    pieces = []
    while piece := sock.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def eventually(check: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)
