"""/v1/kv/events of a real server: filled and evicted blocks by their documented keys, and a new engine."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import NAME, tiny_options

from millrace.plan.kv.block_hash import block_hash, root_hash

pytestmark = pytest.mark.live

KV_TOKENS = 2048


class Listener(threading.Thread):
    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        self.events: list[dict[str, Any]] = []
        self.held: set[str] = set()
        self.start()

    def run(self) -> None:
        self._connection.request("GET", "/v1/kv/events")
        answer = self._connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event["tier"] == "device":
                    self.apply(event["kind"], set(event["blocks"]))
                self.events.append(event)

    def apply(self, kind: str, blocks: set[str]) -> None:
        if kind in ("snapshot", "cleared"):
            self.held = blocks
        else:
            self.held = self.held - blocks if kind == "evicted" else self.held | blocks

    def saw(self, kind: str) -> bool:
        return any(event["kind"] == kind for event in self.events)


def ask(served: Served, prompt: list[int]) -> None:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert served.request("POST", "/v1/completions", body)[0] == 200


def keys_of(prompt: list[int], block_tokens: int) -> list[str]:
    parent, found = root_hash(b""), []
    for start in range(0, len(prompt) - block_tokens + 1, block_tokens):
        tokens = b"".join(one.to_bytes(4, "little") for one in prompt[start : start + block_tokens])
        parent = block_hash(parent, tokens)
        found.append(parent.hex()[:16])
    return found


def test_a_listener_follows_the_cache_and_a_new_engine(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--kv-tokens", str(KV_TOKENS)) as served:
        first = [1 + number % 200 for number in range(300)]
        ask(served, first)
        listener = Listener(served)
        wait_until(lambda: bool(listener.events), "a snapshot")
        assert (listener.events[0]["kind"], listener.events[0]["seq"]) == ("snapshot", 1)
        block_tokens = listener.events[0]["block_tokens"]
        expected = keys_of(first, block_tokens)
        assert set(expected[: (len(first) - 1) // block_tokens]) <= listener.held
        second = [2 + number % 190 for number in range(300)]
        ask(served, second)
        wanted = set(keys_of(second, block_tokens)[:-1])
        wait_until(lambda: wanted <= listener.held, "the second prompt is cached")
        for number in range(2 * KV_TOKENS // 300):
            ask(served, [3 + (number * 7 + place) % 150 for place in range(300)])
        wait_until(lambda: expected[0] not in listener.held, "the first prompt is evicted")
        assert len(listener.held) <= KV_TOKENS // block_tokens
        numbers = [event["seq"] for event in listener.events]
        assert numbers == list(range(1, len(numbers) + 1))
        os.kill(served.child("millrace.supervise.engine_child"), signal.SIGKILL)
        wait_until(lambda: listener.saw("cleared"), "the engine is replaced")
        wait_until(lambda: [event["kind"] for event in listener.events].count("snapshot") == 2, "and says what it has")
        assert listener.held == set()
        ask(served, second)
        wait_until(lambda: wanted <= listener.held, "the new engine caches it")
        refused = served.request("GET", "/v1/kv/events", None, {"X-Forwarded-For": "10.0.0.1"})
        assert (refused[0], "all tenants" in refused[1]["error"]["message"]) == (403, True)
