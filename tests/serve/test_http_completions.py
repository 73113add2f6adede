"""Completions over a real socket: every form of prompt, echo, log-probabilities, best_of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import END, MODEL, Front, echo, running_front, saying
from serve.wire import COMPLETIONS, completion_text, post, stream

from millrace.link.messages import NewRequest

pytestmark = pytest.mark.live


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Say", **fields}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(" hello")) as running:
        yield running


@pytest.fixture(scope="module")
def parrot() -> Iterator[Front]:
    with running_front(echo) as running:
        yield running


def test_a_whole_answer(front: Front) -> None:
    answer = post(front.port, COMPLETIONS, body()).json
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": " hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 7


def test_the_default_length_is_sixteen(front: Front) -> None:
    post(front.port, COMPLETIONS, body())
    assert front.engine.received[-1].params.max_tokens == 16


def test_a_stream(front: Front) -> None:
    chunks = stream(front.port, COMPLETIONS, body(stream_options={"include_usage": True}))
    assert completion_text(chunks) == " hello"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert all(chunk["object"] == "text_completion" for chunk in chunks)


def test_the_end_of_an_answer_can_complete_a_stop_string(front: Front) -> None:
    """The longer stop string holds "hello" back until generation ends; then the shorter one matches."""
    fields = body(stop=["hello there", "hello"], max_tokens=6)
    choice = post(front.port, COMPLETIONS, fields).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" ", "stop", "hello")
    chunks = stream(front.port, COMPLETIONS, fields)
    assert completion_text(chunks) == " "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([111, 110, 101], ["one"]),
        ([[111, 110, 101], [116, 119, 111]], ["one", "two"]),
    ],
)
def test_forms_of_prompt(parrot: Front, prompt: Any, texts: list[str]) -> None:
    answer = post(parrot.port, COMPLETIONS, body(prompt=prompt)).json
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    chunks = stream(parrot.port, COMPLETIONS, body(prompt=prompt))
    assert [completion_text(chunks, index) for index in range(len(texts))] == texts


def test_choices_of_several_prompts(parrot: Front) -> None:
    answer = post(parrot.port, COMPLETIONS, body(prompt=["one", "two"], n=2)).json
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_echo(front: Front) -> None:
    assert post(front.port, COMPLETIONS, body(echo=True)).json["choices"][0]["text"] == "Say hello"
    assert completion_text(stream(front.port, COMPLETIONS, body(echo=True))) == "Say hello"
    assert post(front.port, COMPLETIONS, body(prompt=[72, 105], echo=True)).json["choices"][0]["text"] == "Hi hello"


def test_logprobs(front: Front) -> None:
    logprobs = post(front.port, COMPLETIONS, body(logprobs=2)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(" hello")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert logprobs["top_logprobs"][1] == {"h": -0.5, "i": -1.5}
    chunks = stream(front.port, COMPLETIONS, body(logprobs=2))
    streamed: dict[str, list[Any]] = {}
    for chunk in chunks:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed.setdefault(key, []).extend(values)
    assert streamed == logprobs


def test_parts_of_characters_have_names_of_their_own() -> None:
    """The bytes of a character are tokens without a text: each is written with its bytes, so that none is lost."""
    with running_front(saying("é")) as split:
        logprobs = post(split.port, COMPLETIONS, body(logprobs=3)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 0]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3]
    assert logprobs["top_logprobs"][0]["bytes:\\xc3"] == -0.5


def test_zero_logprobs_shows_the_chosen_token(front: Front) -> None:
    logprobs = post(front.port, COMPLETIONS, body(logprobs=0)).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {" ": -0.5}


def test_echo_with_logprobs(front: Front) -> None:
    logprobs = post(front.port, COMPLETIONS, body(echo=True, logprobs=1)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Say hello")
    assert logprobs["text_offset"] == list(range(9))
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 8
    assert logprobs["top_logprobs"][0] is None
    chunks = stream(front.port, COMPLETIONS, body(echo=True, logprobs=1))
    assert completion_text(chunks) == "Say hello"
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == list("Say")


def test_scoring_a_prompt(front: Front) -> None:
    fields = body(echo=True, logprobs=1, max_tokens=0)
    answer = post(front.port, COMPLETIONS, fields).json
    assert answer["choices"][0]["text"] == "Say"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0
    assert completion_text(stream(front.port, COMPLETIONS, fields)) == "Say"


def test_prompt_logprobs_and_token_ids(front: Front) -> None:
    choice = post(front.port, COMPLETIONS, body(prompt_logprobs=0, return_token_ids=True)).json["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["97"]["decoded_token"] == "a"
    assert bytes(choice["prompt_token_ids"]) == b"Say"
    assert bytes(choice["token_ids"]) == b" hello"
    chunks = stream(front.port, COMPLETIONS, body(return_token_ids=True))
    assert bytes(chunks[0]["choices"][0]["prompt_token_ids"]) == b"Say"


def test_offsets_count_characters_not_bytes() -> None:
    with running_front(saying("é🌍a")) as front:
        logprobs = post(front.port, COMPLETIONS, body(logprobs=0)).json["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


def test_best_of_returns_the_likeliest() -> None:
    with running_front(saying("x")) as front:
        texts = iter([b"low", b"top", b"mid"])
        scores = {b"low"[0]: -3.0, b"top"[0]: -0.1, b"mid"[0]: -1.0}

        def script(request: NewRequest) -> list[int]:
            return [next(texts)[0], END]

        front.engine.script = script
        engine = front.engine
        plain = engine.score

        def score(token_id: int, num_top: int) -> Any:
            entry = plain(token_id, num_top)
            return type(entry)(token_id, scores[token_id], 1, entry.top_ids, entry.top_logprobs)

        engine.score = score  # type: ignore[method-assign]
        answer = post(front.port, COMPLETIONS, body(n=2, best_of=3)).json
    assert [choice["text"] for choice in answer["choices"]] == ["t", "m"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6


def test_best_of_equal_to_n_is_plain(front: Front) -> None:
    assert len(post(front.port, COMPLETIONS, body(n=2, best_of=2)).json["choices"]) == 2
    assert completion_text(stream(front.port, COMPLETIONS, body(best_of=1))) == " hello"
