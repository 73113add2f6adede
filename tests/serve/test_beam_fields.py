"""Beams over HTTP: their stop strings, their log-probabilities, and what cannot be combined with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.served import wait_until
from serve.front_under_test import MODEL, Front, byte_tokenizer, endless, running_front, saying
from serve.wire import CHAT, COMPLETIONS, post

from millrace.beams import BeamSearch
from millrace.link.messages import TokenLogprobs, unpack_tokens
from millrace.params.beams import BeamParams
from millrace.params.sampling import SamplingParams
from millrace.text.text_stream import stop_finder

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello")) as running:
        yield running


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "ab", **fields}


def following(*tokens: int, best: float = -1.0) -> TokenLogprobs:
    """These tokens follow, the likeliest with this log-probability, each further one with one less."""
    return TokenLogprobs(tokens[0], best, 1, tokens, tuple(best - number for number in range(len(tokens))))


def test_a_beam_ends_with_its_stop_string() -> None:
    has_stop = stop_finder(byte_tokenizer(), SamplingParams(stop=("bc",)))
    search = BeamSearch(BeamParams(2), max_tokens=9, end_token_ids=(), has_stop=has_stop)
    a, b, c = b"abc"
    search.advance([following(a, b)])
    assert [beam.token_ids for beam in search.live] == [(a,), (b,)]
    search.advance([following(b, a, best=-3.0), following(c, b)])
    assert [beam.token_ids for beam in search.finished] == [(b, c)]
    assert [beam.token_ids for beam in search.live] == [(a, b), (b, b)]
    assert not search.finished[0].is_stopped  # its last token belongs to the text


def test_stop_strings_are_found_at_the_end_of_long_texts() -> None:
    has_stop = stop_finder(byte_tokenizer(), SamplingParams(stop=("né", "xyz")))
    assert has_stop is not None
    assert has_stop(("a" * 500 + "né").encode())
    assert not has_stop(("a" * 500 + "né").encode()[:-1])
    assert not has_stop(("né" + "a" * 500).encode())
    assert stop_finder(byte_tokenizer(), SamplingParams()) is None


def test_no_beam_goes_on_after_a_stop_string(front: Front) -> None:
    before = len(front.engine.received)
    answer = post(front.port, COMPLETIONS, completion(num_beams=2, n=2, max_tokens=4, stop="H")).json
    prompts = [bytes(unpack_tokens(step.prompt).tolist()) for step in front.engine.received[before:]]
    assert not [prompt for prompt in prompts if b"H" in prompt]
    assert [one["stop_reason"] for one in answer["choices"] if one["finish_reason"] == "stop"] == ["H", "H"]


@pytest.mark.parametrize("wanted", [0, 1, 8])
def test_a_beam_has_as_many_logprobs_as_asked_for(front: Front, wanted: int) -> None:
    messages = [{"role": "user", "content": "hi"}]
    sent = {"model": MODEL, "messages": messages, "num_beams": 2, "logprobs": True, "top_logprobs": wanted}
    [choice] = post(front.port, CHAT, {**sent, "max_tokens": 2}).json["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [wanted, wanted]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 21}, "beam_width"),
        ({"use_beam_search": False, "num_beams": 3}, "num_beams"),
        ({"use_beam_search": True, "n": 30}, "n"),
        ({"use_beam_search": True, "best_of": 30}, "best_of"),
        ({"num_beams": 3, "best_of": 2}, "best_of"),
        ({"num_beams": 2, "self_consistency": {"samples": 3, "regex": "a"}}, "self_consistency"),
        ({"num_beams": 2, "echo": True, "logprobs": 1}, "echo"),
        ({"num_beams": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"num_beams": 2.0}, "num_beams"),
    ],
)
def test_what_beams_cannot_have_is_named_as_it_was_sent(front: Front, fields: dict[str, Any], param: str) -> None:
    error = post(front.port, COMPLETIONS, completion(**fields)).error
    assert (error["param"], error["message"].startswith((param, f"'{param}'"))) == (param, True), error


def test_a_search_is_one_open_request() -> None:
    """However many steps it has in flight, they are not refused for too many open requests."""
    with running_front(endless, max_open=1) as front:
        sent = completion(num_beams=4, max_tokens=3, ignore_eos=True)
        assert [post(front.port, COMPLETIONS, sent).status for _ in range(2)] == [200, 200]
        steps = [one.search for one in front.engine.received]
        assert (len(steps) > 8, None in steps, len(set(steps))) == (True, False, 2)
        assert front.call(lambda: front.state.client.num_open) == 0
        front.engine.paused = True
        with ThreadPoolExecutor(1) as other:
            first = other.submit(post, front.port, COMPLETIONS, sent)
            wait_until(lambda: front.call(lambda: front.state.client.num_open) == 1, "it is open")
            assert post(front.port, COMPLETIONS, sent).status == 429
            front.call(front.engine.resume)
            assert first.result(timeout=60).status == 200


def test_a_search_that_fails_is_ended() -> None:
    with running_front(endless) as front:
        front.engine.poison.update(range(1, 100))
        assert post(front.port, COMPLETIONS, completion(num_beams=2, max_tokens=3)).status == 500
        [end] = [one.finish for one in front.engine.searches]
        assert (end.reason, end.message) == ("error", "The step that computed this request failed.")
        assert front.call(lambda: front.state.client.num_open) == 0
