"""Requests that set no sampling get the model's recommendation, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import post

from millrace.params.defaults import SamplingDefaults

pytestmark = pytest.mark.live

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("ok")) as running:
        running.state.sampling_defaults = SamplingDefaults(temperature=0.25, top_p=0.5, repetition_penalty=1.1)
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_recommendation_is_the_default(front: Front, path: str) -> None:
    assert post(front.port, path, {"model": MODEL, **BODIES[path]}).status == 200
    params = front.engine.received[-1].params
    assert (params.temperature, params.top_p, params.repetition_penalty, params.top_k) == (0.25, 0.5, 1.1, 0)


@pytest.mark.parametrize("path", BODIES)
def test_request_wins_and_greedy_stays_plain(front: Front, path: str) -> None:
    fields = {"options": {"temperature": 0}} if path.startswith("/api") else {"temperature": 0}
    assert post(front.port, path, {"model": MODEL, **BODIES[path], **fields}).status == 200
    params = front.engine.received[-1].params
    assert (params.temperature, params.top_p, params.repetition_penalty, params.top_k) == (0.0, 1.0, 1.0, 0)


def test_response_says_what_was_used(front: Front) -> None:
    answer = post(front.port, "/v1/responses", {"model": MODEL, "input": "Hi"}).json
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
