"""`python dying_server.py PORT ANSWERS`: the fake server as a program. It exits during a request of 3 tokens after so
many of them."""

from __future__ import annotations

import os
import sys
from http.server import ThreadingHTTPServer
from typing import Any

import fake_openai  # The neighbour of this file, which is run as a program.


class Handler(fake_openai.Handler):  # Of the same helper: its server runs within the test.
    fake = fake_openai.FakeServer()
    num_answers = int(sys.argv[2])

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json(200, {})
        else:
            super().do_GET()

    def stream(self, body: dict[str, Any], *, chat: bool) -> None:
        if sum(request["max_tokens"] == 3 for request in self.fake.requests) > self.num_answers:
            print("worn out", flush=True)
            os._exit(3)
        super().stream(body, chat=chat)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
