"""`bad_words` and `allowed_token_ids` over HTTP: what reaches the engine, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import END, MODEL, VOCAB, Front, running_front, saying
from serve.wire import CHAT, COMPLETIONS, post

from millrace.errors import BadRequest
from millrace.params.grammar import Grammar, ThinkingLimit
from millrace.params.sampling import MAX_ALLOWED_TOKENS, MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, SamplingParams

pytestmark = pytest.mark.live

MESSAGES = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello")) as running:
        yield running


def bodies(**fields: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    return (
        (CHAT, {"model": MODEL, "messages": MESSAGES, **fields}),
        (COMPLETIONS, {"model": MODEL, "prompt": "a", **fields}),
    )


def test_both_reach_the_engine(front: Front) -> None:
    fields = {"bad_words": ["ab", "\n"], "allowed_token_ids": [5, END]}
    others = (
        ("/v1/responses", {"input": "a", "store": False, **fields}),
        ("/api/generate", {"prompt": "a", "stream": False, "options": fields}),
    )
    for path, sent in (*bodies(**fields), *others):
        reply = post(front.port, path, {"model": MODEL, **sent})
        assert reply.status == 200, reply.json
        params = front.engine.received[-1].params
        assert params.bad_word_ids == ((97, 98), (10,))
        assert params.allowed_token_ids == (5, END)


def test_an_empty_list_of_words_and_null_forbid_nothing(front: Front) -> None:
    for path, sent in bodies(bad_words=[], allowed_token_ids=None):
        assert post(front.port, path, sent).status == 200
        params = front.engine.received[-1].params
        assert (params.bad_words, params.bad_word_ids, params.allowed_token_ids) == ((), None, None)


REFUSED = [
    ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
    ({"allowed_token_ids": [-1, 5]}, "allowed_token_ids", "-1"),
    ({"allowed_token_ids": [5, VOCAB]}, "allowed_token_ids", f"names token id {VOCAB}; the vocabulary has ids 0 to"),
    ({"allowed_token_ids": [2**70]}, "allowed_token_ids", "must be between"),
    ({"allowed_token_ids": [5] * (MAX_ALLOWED_TOKENS + 1)}, "allowed_token_ids", f"at most {MAX_ALLOWED_TOKENS}"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]", "an integer"),
    ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids", "min_tokens forbids"),
    ({"allowed_token_ids": [7, END], "min_tokens": 1, "stop_token_ids": [7]}, "allowed_token_ids", "min_tokens"),
    ({"allowed_token_ids": [5], "num_beams": 2}, "allowed_token_ids", "beam search"),
    ({"allowed_token_ids": [5], "response_format": FORMAT}, "allowed_token_ids", "combined with a grammar"),
    ({"bad_words": [""]}, "bad_words", "0 characters"),
    ({"bad_words": ["a" * (MAX_BAD_WORD_CHARS + 1)]}, "bad_words", f"{MAX_BAD_WORD_CHARS + 1} characters"),
    ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words", f"at most {MAX_BAD_WORDS}"),
    ({"bad_words": "a"}, "bad_words", "an array"),
    ({"bad_words": ["a"], "num_beams": 2}, "bad_words", "beam search"),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_refused(front: Front, fields: dict[str, Any], param: str, says: str, streams: bool) -> None:
    num_received = len(front.engine.received)
    for path, sent in bodies(**fields, **({"stream": True} if streams and "num_beams" not in fields else {})):
        reply = post(front.port, path, sent)
        assert reply.status == 400, reply.json
        assert reply.json["error"]["param"] == param
        assert says in reply.json["error"]["message"]
    assert len(front.engine.received) == num_received


def test_a_constraint_needs_tokens_of_its_own() -> None:
    for other in ({"grammar": Grammar("json_object")}, {"thinking": ThinkingLimit(3, 1, 2, False)}):
        with pytest.raises(BadRequest, match="allowed_token_ids cannot be combined"):
            SamplingParams(allowed_token_ids=(1,), **other)
        assert SamplingParams(bad_words=("a",), bad_word_ids=((5,),), **other).needs_tokens
