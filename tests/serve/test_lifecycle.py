"""The front while the engine loads, serves, dies, and while the server drains."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import CHAT, Reply, connected, events, eventually, get, post, raw_post, read_all

from millrace.config import Config, replace
from millrace.serve.generate import heartbeat

pytestmark = pytest.mark.live


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def in_background(front: Front, fields: dict[str, Any]) -> Future[Reply]:
    """Send a request from another thread; returns once the engine has its sequences."""
    num_before = len(front.engine.received)
    reply = in_thread(lambda: post(front.port, CHAT, fields))
    eventually(lambda: len(front.engine.received) == num_before + fields.get("n", 1))
    return reply


def in_thread(ask: Callable[[], Reply]) -> Future[Reply]:
    reply: Future[Reply] = Future()
    threading.Thread(target=lambda: reply.set_result(ask()), daemon=True).start()
    return reply


def test_before_the_engine_is_ready() -> None:
    with running_front(saying("ok"), is_ready=False) as front:
        assert get(front.port, "/health").json == {"status": "ok"}
        ready = get(front.port, "/ready")
        assert ready.status == 503
        assert "loading" in ready.json["reason"]
        front.state.loading_wait_s = 0.1
        assert post(front.port, CHAT, body(stream=True)).status == 503, "no stream begins before its first comment"
        reply = post(front.port, CHAT, body())
        assert reply.status == 503
        assert reply.error["code"] == "engine_unavailable"
        assert int(reply.headers["retry-after"]) > 0
        assert get(front.port, "/v1/models").json["data"][0]["id"] == MODEL
        assert get(front.port, "/metrics").status == 200
        front.call(front.engine.become_ready)
        assert get(front.port, "/ready").json == {"status": "ready"}
        assert post(front.port, CHAT, body()).status == 200


def test_a_request_during_loading_waits_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_front(saying("ok"), is_ready=False) as front:
        is_waiting, client = threading.Event(), front.state.client
        wait_ready = client.wait_ready

        async def wait(limit_s: float) -> None:
            is_waiting.set()
            await wait_ready(limit_s)

        monkeypatch.setattr(client, "wait_ready", wait)
        reply = in_thread(lambda: post(front.port, CHAT, body()))
        assert is_waiting.wait(60)
        assert post(front.port, CHAT, {"nonsense": 1}).status == 400
        assert not reply.done()
        front.call(front.engine.become_ready)
        assert reply.result(60).status == 200


def test_a_stream_without_a_model_tells_that_the_first_one_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.05)
    fields = {name: value for name, value in body(stream=True).items() if name != "model"}
    with running_front(saying("ok"), is_ready=False) as front:
        with connected(front.port) as sock:
            sock.sendall(raw_post(CHAT, fields, headers="Connection: close\r\n"))
            begun = b""
            while b": The model" not in begun:
                begun += sock.recv(1000)
            front.call(front.engine.become_ready)
            rest = read_all(sock)
        assert b"data: " not in begun
        assert b"data: [DONE]\n\n" in rest


def test_ready_means_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.link.client.STALL_S", 0.2)
    with running_front(endless) as front:
        front.call(front.engine.pause)
        reply = in_background(front, body(max_tokens=3))
        eventually(lambda: get(front.port, "/ready").status == 503)
        assert "no steps" in get(front.port, "/ready").json["reason"]
        assert get(front.port, "/health").status == 200
        front.call(front.engine.resume)
        assert reply.result(60).status == 200
        assert get(front.port, "/ready").status == 200


def test_the_engine_dies() -> None:
    with running_front(endless, step_s=0.01) as front:
        waiting = in_background(front, body(max_tokens=4000))
        with connected(front.port) as sock:
            sock.sendall(raw_post(CHAT, body(stream=True, max_tokens=4000), headers="Connection: close\r\n"))
            first = sock.recv(1000)
            assert first.startswith(b"HTTP/1.1 200")
            front.call(lambda: front.engine.die("The engine process ended with exit code -9."))
            rest = first + read_all(sock)
        lines = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        error = json.loads(lines[-2][6:])["error"]
        assert error["code"] == "engine_unavailable"
        assert "exit code -9" in error["message"]
        assert rest.endswith(b"0\r\n\r\n")
        assert waiting.result(60).status == 503
        assert get(front.port, "/ready").status == 503
        assert get(front.port, "/health").status == 200
        assert post(front.port, CHAT, body()).status == 503


def test_a_poisoned_request_fails_alone() -> None:
    with running_front(endless) as front:
        front.call(front.engine.pause)
        fine, poisoned = in_background(front, body(max_tokens=200)), in_background(front, body(max_tokens=300))
        front.engine.poison.add(front.engine.received[-1].id)
        front.call(front.engine.resume)
        assert poisoned.result(60).status == 500
        assert poisoned.result().error["code"] == "request_failed"
        assert fine.result(60).status == 200


def test_deadlines() -> None:
    with running_front(endless, step_s=0.01) as front:
        reply = post(front.port, CHAT, body(timeout=0.2))
        assert reply.status == 504
        assert reply.error["code"] == "deadline_exceeded"
        with connected(front.port) as sock:
            sock.sendall(raw_post(CHAT, body(timeout=100, stream=True), headers="Connection: close\r\n"))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            front.engine.late_s = 1000.0
            lines = [line for line in read_all(sock).split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(lines[-2][6:])["error"]["code"] == "deadline_exceeded"
        assert lines[-1] == b"data: [DONE]"


def test_an_engine_that_ignores_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.serve.generate.work.DEADLINE_SLACK_S", 0.1)
    with running_front(endless) as front:
        front.call(front.engine.pause)
        assert post(front.port, CHAT, body(timeout=0.2, stream=True)).status == 504
        assert front.call(lambda: len(front.engine.rows)) == 0


def test_overload() -> None:
    with running_front(endless, max_open=2) as front:
        front.call(front.engine.pause)
        running = in_background(front, body(max_tokens=5, n=2))
        reply = post(front.port, CHAT, body(max_tokens=2))
        assert reply.status == 429
        assert reply.error["type"] == "rate_limit_error"
        assert int(reply.headers["retry-after"]) >= 1
        assert post(front.port, CHAT, body(max_tokens=2, stream=True)).status == 429
        front.call(front.engine.resume)
        assert running.result(60).status == 200
        # If only some sequences are accepted, they are aborted.
        assert post(front.port, CHAT, body(max_tokens=2, n=3)).status == 429
        eventually(lambda: not front.engine.rows)
        assert post(front.port, CHAT, body(max_tokens=2, n=2)).status == 200


def test_drain_lets_requests_finish() -> None:
    with running_front(endless, config=replace(Config(), server__drain_timeout_s=60.0)) as front:
        front.call(front.engine.pause)
        running = in_background(front, body(max_tokens=200))
        with connected(front.port) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            sock.recv(1000)
            front.begin_stop()
            eventually(lambda: front.state.draining)
            sock.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 503")
        refused = post(front.port, CHAT, body())
        assert refused.status == 503
        assert "shutting down" in refused.error["message"]
        front.call(front.engine.resume)
        reply = running.result(60)
        assert reply.status == 200
        assert len(reply.json["choices"][0]["message"]["content"]) == 200


def test_drain_has_a_limit() -> None:
    config = replace(Config(), server__drain_timeout_s=0.3)
    with running_front(endless, config=config, step_s=0.01) as front:
        running = in_background(front, body(max_tokens=4000))
        with connected(front.port) as sock:
            sock.sendall(raw_post(CHAT, body(stream=True, max_tokens=4000)))
            sock.recv(1000)
            front.begin_stop()
            rest = read_all(sock)
        reply = running.result(60)
        assert reply.status == 503
        assert "shut down" in reply.error["message"]
        assert b"shut down" in rest
        assert b"data: [DONE]" in rest
        eventually(lambda: not front.engine.rows)


def test_no_request_leaves_a_task_behind() -> None:
    with running_front(saying("ok")) as front:
        for _ in range(5):
            events(post(front.port, CHAT, body(stream=True)))
            post(front.port, CHAT, body())
        eventually(lambda: front.call(lambda: len(asyncio.all_tasks())) <= 3)
