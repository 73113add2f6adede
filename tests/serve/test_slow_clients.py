"""Clients that read slowly, stop reading or disconnect: memory is bounded, and no other client is affected."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, endless, running_front
from serve.wire import CHAT, COMPLETIONS, connected, events, eventually, get, post, raw_post, read_all

from millrace.config import Config, replace
from millrace.link.messages import NewRequest
from millrace.serve.http.event_stream import LAST_CHUNK

pytestmark = pytest.mark.live

LONG = 200_000


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "go", "stream": True, **fields}


def metric(front: Front, name: str) -> float:
    lines = get(front.port, "/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and not line.startswith("#"))


@pytest.fixture
def front() -> Iterator[Front]:
    config = replace(Config(), server__port=0, server__stream_buffer_kb=16, server__drain_timeout_s=1.0)
    with running_front(endless, config=config, max_context=LONG + 100, kv_tokens=LONG * 8, step_s=0.0002) as running:
        yield running


def test_a_client_that_stops_reading_is_dropped(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "millrace"), connected(front.port, receive_buffer=4096) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(max_tokens=LONG)))
        eventually(lambda: bool(front.engine.aborted))
        # Other clients stream at the same time and afterwards.
        assert len(events(post(front.port, COMPLETIONS, body(max_tokens=20)))) == 21
        eventually(lambda: not front.engine.rows)
        with contextlib.suppress(ConnectionResetError):
            assert not read_all(sock).endswith(LAST_CHUNK), "it must not look like a complete answer"
    assert front.engine.aborted[0][1] == "abort"
    assert metric(front, "millrace_slow_client_drops_total") == 1
    assert "unread" in caplog.text
    eventually(lambda: not front.state.jobs)


def test_a_slow_client_gets_everything_in_fewer_frames(front: Front) -> None:
    """The client pauses until every buffer is full, then reads on: nothing is lost."""
    num_tokens = 4000
    with connected(front.port, receive_buffer=4096) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(max_tokens=num_tokens), headers="Connection: close\r\n"))
        eventually(lambda: any(job.out is not None and job.out.paused for job in list(front.state.jobs)))
        eventually(lambda: not front.engine.rows)
        data = bytearray()
        while piece := sock.recv(2048):
            data += piece
    frames = [line for line in bytes(data).split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames)
    assert text == "".join(chr(97 + i % 26) for i in range(num_tokens))
    assert len(frames) < num_tokens
    assert bytes(data).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert metric(front, "millrace_slow_client_drops_total") == 0


def test_reading_one_byte_at_a_time_affects_no_other_client(front: Front) -> None:
    with connected(front.port, receive_buffer=4096) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(max_tokens=LONG)))
        sock.recv(1)
        for _ in range(10):
            assert len(events(post(front.port, COMPLETIONS, body(max_tokens=50)))) == 51
            sock.recv(1)


def test_a_detailed_stream_is_bounded_too(front: Front) -> None:
    with connected(front.port, receive_buffer=4096) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(max_tokens=LONG, logprobs=5)))
        eventually(lambda: bool(front.engine.aborted))
        eventually(lambda: not front.state.jobs)


def test_flushing_a_finished_stream_has_a_time_limit(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.serve.generate.respond.FLUSH_GRACE_S", 0.3)
    with connected(front.port, receive_buffer=4096) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(max_tokens=9000)))
        eventually(lambda: not front.engine.rows and bool(front.engine.ended))
        eventually(lambda: metric(front, "millrace_slow_client_drops_total") == 1)
        eventually(lambda: not front.state.jobs)


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_aborts_at_once(front: Front, streamed: bool) -> None:
    with connected(front.port) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(stream=streamed, max_tokens=LONG, n=3)))
        eventually(lambda: len(front.engine.rows) == 3)
        if streamed:
            sock.recv(1000)
    eventually(lambda: not front.engine.rows)
    assert {reason for _, reason in front.engine.aborted} == {"abort"}
    assert len(front.engine.aborted) == 3
    eventually(lambda: not front.state.jobs)
    assert metric(front, "millrace_client_disconnects_total") == 1


def test_a_disconnect_before_the_first_token(front: Front) -> None:
    front.call(front.engine.pause)
    with connected(front.port) as sock:
        sock.sendall(raw_post(COMPLETIONS, body(max_tokens=5)))
        eventually(lambda: len(front.engine.rows) == 1)
    eventually(lambda: not front.engine.rows)
    front.call(front.engine.resume)
    eventually(lambda: not front.state.jobs)


def test_a_disconnect_in_the_middle_of_the_body(front: Front) -> None:
    message = raw_post(COMPLETIONS, body(max_tokens=5))
    for cut in range(1, len(message), 7):
        with connected(front.port) as sock:
            sock.sendall(message[:cut])
    assert len(events(post(front.port, COMPLETIONS, body(max_tokens=5)))) == 6
    eventually(lambda: not front.engine.rows and not front.state.jobs)


def test_many_disconnects_at_every_stage(front: Front) -> None:
    """Clients leave at once, when the engine has their request, and after 1 to 1000 bytes of the answer."""
    for number in range(120):
        is_streamed, num_bytes = number % 3 != 0, (0, 0, 1, 100, 1000)[number % 5]
        with connected(front.port) as sock:
            fields = body(max_tokens=LONG, stream=is_streamed, logprobs=[None, 1][number % 2])
            num_before = len(front.engine.received)
            sock.sendall(raw_post(COMPLETIONS, fields))
            if number % 5:
                eventually(lambda num_before=num_before: len(front.engine.received) > num_before)
            if is_streamed and num_bytes:
                sock.recv(num_bytes, socket.MSG_WAITALL)
    eventually(lambda: not front.engine.rows and not front.state.jobs)
    assert front.call(lambda: front.state.client.num_open) == 0
    assert len(events(post(front.port, COMPLETIONS, body(max_tokens=5)))) == 6


def test_a_bug_in_one_stream_does_not_affect_others(front: Front) -> None:
    """A choice that fails must not lose the tokens of other requests in the same step."""

    def script(request: NewRequest) -> list[int]:
        return [97] * 10

    front.engine.script = script

    def break_it() -> None:
        job = next(job for job in front.state.jobs if job.generation.cache_salt == "bad")

        def broken(token_id: int) -> str:
            raise ZeroDivisionError("a defect")

        job.choices[0]._push = broken  # No request can make it fail.

    front.call(front.engine.pause)
    with connected(front.port) as bad, connected(front.port) as good:
        bad.sendall(raw_post(CHAT, chat(cache_salt="bad"), headers="Connection: close\r\n"))
        good.sendall(raw_post(CHAT, chat(), headers="Connection: close\r\n"))
        eventually(lambda: len(front.engine.rows) == 2)
        front.call(break_it)
        front.call(front.engine.resume)
        assert bad.recv(65536).startswith(b"HTTP/1.1 500")
        data = b""
        while piece := good.recv(65536):
            data += piece
        assert data.count(b'"content":"a"') == 10
    eventually(lambda: not front.state.jobs)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 10, **fields}
