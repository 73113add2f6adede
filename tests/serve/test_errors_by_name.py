"""What an error calls a field and its value, in each dialect; integers that are written with a decimal point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, COMPLETIONS, get, post

pytestmark = pytest.mark.live

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER, "max_tokens": 8.0}, "max_tokens"),
        (CHAT, {"messages": USER, "n": 1.0}, "n"),
        (CHAT, {"messages": USER, "seed": 5.0}, "seed"),
        (CHAT, {"messages": USER, "mirostat": 2.0}, "mirostat"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1.0}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1.0]}, "stop_token_ids[0]"),
        (COMPLETIONS, {"prompt": [1.0]}, "prompt"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 8.0}, "max_output_tokens"),
        ("/v1/messages", {"messages": USER, "max_tokens": 8.0}, "max_tokens"),
        ("/api/chat", {"model": MODEL, "messages": USER, "options": {"top_k": 8.0}}, "options.top_k"),
        ("/detokenize", {"tokens": [8.0]}, "tokens[0]"),
    ],
)
def test_an_integer_with_a_decimal_point_is_refused(front: Front, path: str, body: dict[str, Any], param: str) -> None:
    reply = post(front.port, path, body)
    said = reply.json["error"] if isinstance(reply.json["error"], dict) else reply.json
    assert (reply.status, said["param"]) == (400, param), said


def test_the_description_says_so(front: Front) -> None:
    assert "8.0 is refused" in get(front.port, "/openapi.json").json["info"]["description"]


@pytest.mark.parametrize("stop", ["", "x" * 1025], ids=["empty", "long"])
def test_an_error_renames_the_field_and_nothing_else(front: Front, stop: str) -> None:
    reply = post(front.port, "/api/chat", {"model": MODEL, "messages": USER, "options": {"stop": [stop]}})
    assert (reply.status, reply.json["param"]) == (400, "options.stop")
    assert reply.json["error"].count("stop") == 1, reply.json["error"]


@pytest.fixture(scope="module")
def small() -> Iterator[Front]:
    with running_front(saying("Hello"), max_context=128) as running:
        yield running


UNLIMITED = {
    "/v1/embeddings": lambda text: {"input": text},
    "/api/embed": lambda text: {"model": MODEL, "input": text},
    "/api/embeddings": lambda text: {"model": MODEL, "prompt": text},
    COMPLETIONS: lambda text: {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0},
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/api/chat": lambda text: {"model": MODEL, "messages": [{"role": "user", "content": text}]},
    "/api/generate": lambda text: {"model": MODEL, "prompt": text, "options": {"num_ctx": 100}},
}
"""Bodies that leave the length of the answer open, or have no answer but a score or a vector."""


@pytest.mark.parametrize("path", UNLIMITED)
@pytest.mark.parametrize("length", [129, 300, 9000])
def test_a_text_that_is_too_long_is_refused_without_a_limit_that_was_not_sent(
    small: Front, path: str, length: int
) -> None:
    body = UNLIMITED[path]("x" * length)
    reply = post(small.port, path, body)
    assert reply.status == 400, reply.body
    said = (
        reply.json["error"] if isinstance(reply.json["error"], dict) else {**reply.json, "message": reply.json["error"]}
    )
    assert said["code"] == "context_length_exceeded"
    assert said["param"].partition(".")[0] in body
    for limit in ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict", "asks for"):
        assert limit not in said["message"], said


def test_a_text_without_an_answer_may_fill_the_context(small: Front) -> None:
    for path in ("/v1/embeddings", "/api/embed", "/api/embeddings", COMPLETIONS):
        reply = post(small.port, path, UNLIMITED[path]("x" * 128))
        assert reply.status == 200, reply.body
    assert post(small.port, CHAT, UNLIMITED[CHAT]("x" * 128)).status == 400


def test_a_limit_that_was_sent_is_named_where_lowering_it_helps(small: Front) -> None:
    error = post(small.port, CHAT, {"messages": USER, "max_completion_tokens": 500}).error
    assert error["param"] == "max_completion_tokens"
    assert "max_completion_tokens is 500" in error["message"]
    long = [{"role": "user", "content": "x" * 200}]
    error = post(small.port, CHAT, {"messages": long, "max_completion_tokens": 500}).error
    assert (error["param"], "max" in error["message"]) == ("messages", False)


def test_scoring_speaks_of_the_limit_that_was_sent(front: Front) -> None:
    scored = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0, "min_tokens": 3}
    error = post(front.port, COMPLETIONS, scored).error
    assert (error["param"], "max_tokens (0)" in error["message"]) == ("min_tokens", True), error
