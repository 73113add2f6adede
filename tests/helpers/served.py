"""A real `millrace serve` in its own processes, for tests that kill some of them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from millrace.bench.local_server import descendants

MODEL = "smollm2-135m-instruct"
QUICK = ("--dtype", "float32", "--kv-tokens", "8192", "--threads", "1")


_SERVING = re.compile(r"^Serving .*http://[^ :]+:(\d+)", re.MULTILINE)


class Served:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @cached_property
    def port(self) -> int:
        """The port that the server chose."""
        found = _SERVING.search(self.log)
        assert found, self.log
        return int(found[1])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Status and decoded body."""
        data = None if body is None else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith("{") else text

    def open_stream(self, **fields: Any) -> Stream:
        return Stream(self.port, {"model": MODEL, "prompt": "Once", "stream": True, "ignore_eos": True, **fields})

    def child(self, word: str) -> int:
        """The child process whose command line contains `word`, once there is exactly one.

        For a moment a process that it starts has its command line too, and one that was killed has none.
        """
        found: list[int] = []

        def is_found() -> bool:
            found[:] = (pid for pid in descendants(self.process.pid) if word in command_line(pid))
            return len(found) == 1

        wait_until(is_found, f"one child process {word}")
        return found[0]

    def metric(self, name: str) -> float:
        _, text = self.request("GET", "/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])


class Stream:
    """A stream of completion events, read as they come."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._answer = self._connection.getresponse()
        self.request_id = self._answer.headers["x-request-id"]
        self.status = self._answer.status

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def close(self) -> None:
        self._connection.close()


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    """`millrace serve` once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "millrace", "serve", "--port", "0", *QUICK, *options]
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        served = Served(process, log)
        try:
            wait_until(lambda: process.poll() is not None or bool(_SERVING.search(served.log)), "it serves", 120.0)
            wait_until(lambda: process.poll() is not None or is_ready(served), "ready")
            assert process.poll() is None, served.log
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def command_line(pid: int) -> str:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def is_ready(served: Served) -> bool:
    try:
        return served.request("GET", "/ready")[0] == 200
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.02)
