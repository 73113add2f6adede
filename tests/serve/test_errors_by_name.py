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
