"""A tiny OpenAI-compatible server for client tests; each feature can be switched off."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """The features, the answers, and the requests received."""

    models: tuple[str, ...] = ("fake",)
    ignore_eos: bool = True
    usage: bool = True
    owner: str = ""
    """`owned_by` of its models. Millrace's own servers send the usage with each event, if they are asked to."""
    completions: bool = True
    chat: bool = True
    tokenize: bool = True
    token_ids: bool = True
    key: str = ""
    status: int = 0
    """If not 0, answer every completion with this status."""
    fail_after: int = -1
    """After this many completions, answer with a 500."""
    token_delay_s: float = 0.0
    stop_after: int = 1 << 30
    """Tokens after which an answer ends, unless `ignore_eos`."""
    answer: tuple[str, ...] = ()
    """The words of an answer; " w0", " w1", … if empty."""
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    disconnects: int = 0
    most_at_once: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one_open(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    class OwnHandler(Handler):
        fake = server

    httpd = _Server(("127.0.0.1", 0), OwnHandler)
    httpd.daemon_threads = True
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may leave at any time; a test that reads what the program prints must not read that."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # each token must leave when it is written

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if self.path == "/v1/models":
            self._json(
                200,
                {"object": "list", "data": [{"id": name, "owned_by": self.fake.owner} for name in self.fake.models]},
            )
        else:
            self._error(404, "there is no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        if self.path == "/tokenize" and self.fake.tokenize:
            self._json(200, {"tokens": [100 + len(word) for word in body["prompt"].split()]})
        elif self.path == "/v1/completions" and self.fake.completions:
            self._complete(body, chat=False)
        elif self.path == "/v1/chat/completions" and self.fake.chat:
            self._complete(body, chat=True)
        else:
            self._error(404, "there is no such page")

    def _allowed(self) -> bool:
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self._error(401, "a key is needed")
            return False
        return True

    def _complete(self, body: dict[str, Any], *, chat: bool) -> None:
        fake = self.fake
        fake.requests.append(body)
        problem = self._refusal(body)
        if fake.status:
            self._error(fake.status, "so it was decided")
        elif problem:
            self._error(400, problem)
        elif 0 <= fake.fail_after < len(fake.requests):
            self._error(500, "worn out")
        else:
            self.stream(body, chat=chat) if body.get("stream") else self._whole(body, chat=chat)

    def _refusal(self, body: dict[str, Any]) -> str:
        if "ignore_eos" in body and not self.fake.ignore_eos:
            return "unknown field ignore_eos"
        if "stream_options" in body and not self.fake.usage:
            return "unknown field stream_options"
        if isinstance(body.get("prompt"), list) and not self.fake.token_ids:
            return "prompt must be a string"
        return ""

    def _words(self, body: dict[str, Any]) -> list[str]:
        count = body.get("max_tokens") or 16
        if not body.get("ignore_eos"):
            count = min(count, self.fake.stop_after)
        words = list(self.fake.answer) or [f" w{i}" for i in range(count)]
        return words[:count]

    def _usage(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        return {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}

    def _whole(self, body: dict[str, Any], *, chat: bool) -> None:
        words = self._words(body)
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        self._json(200, {"choices": [choice], "usage": self._usage(body, len(words))})

    def stream(self, body: dict[str, Any], *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        words = self._words(body)
        try:
            # Closed before the client sees the end: it may send its next request before this thread runs again.
            with self.fake.one_open():
                is_counted = (body.get("stream_options") or {}).get("continuous_usage_stats")
                for number, word in enumerate(words, start=1):
                    time.sleep(self.fake.token_delay_s)
                    choice = {"delta": {"content": word}} if chat else {"text": word}
                    usage = {"usage": self._usage(body, number)} if is_counted else {}
                    self._event({"choices": [{"index": 0, **choice}], **usage})
            if body.get("stream_options"):
                self._event({"choices": [], "usage": self._usage(body, len(words))})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except (BrokenPipeError, ConnectionResetError):
            self.fake.disconnects += 1
            self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _error(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "t", "param": None, "code": None}})

    def _json(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
