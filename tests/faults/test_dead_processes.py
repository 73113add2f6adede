"""A killed engine, a killed front, and a drained server: what clients see and what continues."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from pathlib import Path

import pytest
from helpers.served import Served, Stream, is_ready, serving, wait_until
from helpers.tiny_server import NAME, tiny_options

pytestmark = pytest.mark.live

ENDLESS = 30_000
"""Tokens of a stream that runs until something ends it."""


def open_stream(served: Served, max_tokens: int) -> Stream:
    return served.open_stream(model=NAME, max_tokens=max_tokens)


def answer(served: Served) -> int:
    # Answers are sampled; without `ignore_eos` about one in several hundred would end early.
    asked = {"model": NAME, "prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
    return served.request("POST", "/v1/completions", asked)[0]


def test_killed_engine_is_replaced_and_every_stream_gets_an_error_if_none_may_wait(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--fronts", "2", "--resume-s", "0") as served:
        streams = [open_stream(served, ENDLESS) for _ in range(4)]
        events = [iter(stream) for stream in streams]
        assert all("choices" in next(stream) for stream in events)
        os.kill(served.child("millrace.supervise.engine_child"), signal.SIGKILL)
        for stream in events:
            last = list(stream)[-1]
            assert last["error"]["code"] == "engine_unavailable"
            assert "engine" in last["error"]["message"]
        # A front without streams notices a moment later.
        wait_until(lambda: not is_ready(served), "the fronts know")
        body = served.request("GET", "/ready")[1]
        assert body["status"] == "not ready"
        assert "restarted" in body["reason"]
        assert served.request("GET", "/health")[0] == 200
        assert answer(served) == 503
        wait_until(lambda: is_ready(served) and answer(served) == 200, "the next engine serves")
        # Both fronts must have found the new engine; the kernel spreads connections over them.
        wait_until(lambda: all(answer(served) == 200 for _ in range(20)), "both fronts serve")
        assert served.metric("millrace_engine_starts_total") == 2
        assert served.process.poll() is None
        kill_a_front(served)
        drain(served)


def kill_a_front(served: Served) -> None:
    """Its own streams end, the others continue, it is replaced, and one scrape counts both fronts."""
    wait_until(lambda: served.metric("millrace_fronts_up") == 2, "two fronts")
    dead = served.child("front_child")
    streams = [open_stream(served, 40) for _ in range(20)]
    os.kill(dead, signal.SIGKILL)
    ends = [ends_whole(stream) for stream in streams]
    assert any(ends), "no stream of the other front continued"
    wait_until(lambda: served.metric("millrace_front_restarts_total") == 1, "the death is counted")
    wait_until(lambda: served.metric("millrace_fronts_up") == 2, "a new front serves")
    assert served.child("front_child") != dead
    wait_until(lambda: served.metric("millrace_running_requests") == 0, "the dead front's requests were ended")
    before = served.metric('millrace_requests_total{finish_reason="length",route="/v1/completions",status="200"}')
    for _ in range(12):
        assert answer(served) == 200
    after = served.metric('millrace_requests_total{finish_reason="length",route="/v1/completions",status="200"}')
    assert after - before == 12, "one scrape counts the requests of all fronts"


def ends_whole(stream: Stream) -> bool:
    try:
        events = list(stream)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return bool(events) and events[-1]["choices"][0]["finish_reason"] == "length"


def drain(served: Served) -> None:
    """SIGTERM: not ready at once, running requests may finish, new ones are refused."""
    events = iter(open_stream(served, 2000))
    next(events)
    served.process.send_signal(signal.SIGTERM)
    assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(60) == 0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--drain-timeout-s", "3600") as served:
        events = iter(open_stream(served, ENDLESS))
        next(events)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(served), "not ready while draining")
        refused = served.request("POST", "/v1/completions", {"model": NAME, "prompt": "Hi", "max_tokens": 2})
        assert refused[0] == 503
        assert "shutting down" in refused[1]["error"]["message"]
        ends: list[dict[str, object]] = []
        reader = threading.Thread(target=lambda: ends.extend(events))
        reader.start()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
        reader.join(60)
        assert "shut down" in ends[-1]["error"]["message"]
