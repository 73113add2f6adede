"""Starts `python -m millrace serve` in its own process, as a user does. For tests."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_LIMIT_S = 180.0
_SERVING = re.compile(r"http://[^ :]+:(\d+)")


class RealServer:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace", "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self.lines: list[str] = []
        self._found: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.port = self._found.get(timeout=START_LIMIT_S)
        except queue.Empty:
            self.port = 0
        if self.port == 0:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.lines))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = _SERVING.search(line)
            if found and "Serving" in line:
                self._found.put(int(found[1]))
        self._found.put(0)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = 60.0) -> int:
        code = self.process.wait(limit_s)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


@contextmanager
def real_server(*options: str) -> Iterator[RealServer]:
    server = RealServer(*options)
    try:
        yield server
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
            started = time.monotonic()
            assert server.wait() == 0, "".join(server.lines)
            assert time.monotonic() - started < 30
    finally:
        server.kill()
