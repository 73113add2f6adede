"""How answers are chosen: sampler fields, best_of, beams, votes, predictions, suffixes, and what a prompt scores."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from serve.front_under_test import END, MODEL, Front, running_front, saying
from serve.wire import CHAT, chat_text, post, stream

from millrace.beams import check_beams
from millrace.config import Config, replace
from millrace.errors import BadRequest
from millrace.link.messages import NewRequest, TokenLogprobs, unpack_tokens
from millrace.params.beams import BeamParams
from millrace.params.grammar import ThinkingLimit
from millrace.params.sampling import SamplingParams
from millrace.serve.generate.choices import CollectedChoice
from millrace.serve.generate.choosing.beam_fields import SelfConsistency
from millrace.serve.generate.choosing.best import MATCH_S, Ballot, elect
from millrace.serve.generate.events import Output

pytestmark = pytest.mark.live

COMPLETIONS = "/v1/completions"
OLLAMA = "/api/chat"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def numbered(request: NewRequest) -> list[int]:
    """The answer depends on the seed: 7, 8, 7, 9, 7 …"""
    number = (7, 8, 7, 9, 7)[(request.params.seed or 0) % 5]
    return [*f'{{"result": {{"n": [{number}]}}}}'.encode(), END]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Hello")) as running:
        yield running


@pytest.fixture(scope="module")
def voters() -> Iterator[Front]:
    with running_front(numbered) as running:
        yield running


SAMPLERS = {
    "typical_p": 0.9,
    "top_a": 0.2,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_sequence_breakers": ["\n", "ab"],
    "dry_penalty_last_n": 64,
    "mirostat_mode": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "repeat_last_n": 32,
    "dynatemp_min": 0.5,
    "dynatemp_max": 1.5,
    "dynatemp_exponent": 2.0,
}


def check_samplers(request: NewRequest) -> None:
    params = request.params
    assert (params.typical_p, params.top_a, params.xtc_probability, params.xtc_threshold) == (0.9, 0.2, 0.5, 0.2)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_range) == (0.8, 1.5, 3, 64)
    assert params.dry_breaker_ids == (ord("\n"), ord("b"))
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta, params.repeat_last_n) == (2, 4.0, 0.2, 32)
    assert (params.temperature, params.dynatemp_range, params.dynatemp_exponent) == (1.0, 0.5, 2.0)


def test_sampler_fields_reach_the_engine_from_every_dialect(front: Front) -> None:
    bodies = (
        (CHAT, body(**SAMPLERS)),
        (COMPLETIONS, {"model": MODEL, "prompt": "a", **SAMPLERS}),
        ("/v1/responses", {"model": MODEL, "input": "a", "store": False, **SAMPLERS}),
        (OLLAMA, body(options=SAMPLERS, stream=False)),
    )
    for path, sent in bodies:
        reply = post(front.port, path, sent)
        assert reply.status == 200, (path, reply.json)
        check_samplers(front.engine.received[-1])
    # Mirostat is on, so Ollama's default cuts are off.
    assert (front.engine.received[-1].params.top_k, front.engine.received[-1].params.top_p) == (0, 1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 0.0}, "typical_p"),
        ({"mirostat": 2, "mirostat_mode": 1}, "mirostat"),
        ({"dynatemp_min": 1.0}, "dynatemp_min"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dynatemp_min": 0.0, "dynatemp_max": 300.0}, "dynatemp_max"),
        ({"num_beams": 2, "top_p": 0.5}, "top_p"),
        ({"num_beams": 2, "n": 3}, "n"),
        ({"num_beams": 20}, "num_beams"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"self_consistency": {"samples": 3}}, "self_consistency"),
        ({"self_consistency": {"samples": 3, "regex": "("}}, "self_consistency.regex"),
        ({"self_consistency": {"samples": 3, "json_path": "a[x]"}}, "self_consistency.json_path"),
        ({"self_consistency": {"samples": 3, "json_path": "$a[x]"}}, "self_consistency.json_path"),
        ({"self_consistency": {"samples": 3, "regex": "a"}, "n": 2}, "self_consistency"),
    ],
)
def test_wrong_options_are_named(front: Front, fields: dict[str, Any], param: str) -> None:
    for path, sent in ((CHAT, body(**fields)), (COMPLETIONS, {"model": MODEL, "prompt": "a", **fields})):
        reply = post(front.port, path, sent)
        assert reply.status == 400, (path, reply.json)
        assert reply.json["error"]["param"] == param


def test_options_of_ollamas_runner_are_accepted(front: Front) -> None:
    options = {"num_gpu": 99, "num_thread": 4, "repeat_last_n": 64, "num_batch": 512, "use_mmap": True, "num_keep": 4}
    reply = post(front.port, OLLAMA, body(options={**options, "repeat_penalty": 1.1}, stream=False))
    assert reply.status == 200, reply.json
    params = front.engine.received[-1].params
    assert (params.repeat_last_n, params.repetition_penalty) == (64, 1.1)
    reply = post(front.port, OLLAMA, body(options={"tfs_z": 0.5}, stream=False))
    assert (reply.status, reply.json["param"]) == (400, "options.tfs_z")


def test_best_of_on_chat(front: Front) -> None:
    answer = post(front.port, CHAT, body(best_of=4, n=2)).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * 6
    assert "vote" not in answer


@pytest.mark.parametrize(
    "field",
    [{"json_path": "result.n[0]"}, {"json_path": "$.result.n[0]"}, {"regex": r"\[(\d+)\]"}, {"regex": r"(?:\d)"}],
    ids=["path", "path from $", "group", "all"],
)
def test_the_majority_wins(voters: Front, field: dict[str, str]) -> None:
    answer = post(voters.port, CHAT, body(seed=0, self_consistency={"samples": 5, **field})).json
    [choice] = answer["choices"]
    assert "[7]" in choice["message"]["content"]
    assert answer["vote"] == {"value": "7", "votes": 3, "samples": 5, "majority": True}
    sent = {"model": MODEL, "prompt": "a", "seed": 0, "max_tokens": 99}
    answer = post(voters.port, COMPLETIONS, {**sent, "self_consistency": {"samples": 5, **field}}).json
    assert answer["vote"]["votes"] == 3


def test_a_vote_without_any_field_returns_an_answer(voters: Front) -> None:
    answer = post(voters.port, CHAT, body(self_consistency={"samples": 3, "json_path": "nothing"})).json
    assert answer["vote"] == {"value": None, "votes": 0, "samples": 3, "majority": False}
    # A pattern that backtracks for ever finds nothing in time.
    slow = {"samples": 2, "regex": r"((.*)*)*!"}
    assert post(voters.port, CHAT, body(self_consistency=slow)).json["vote"]["value"] is None


def test_a_vote_in_which_all_answers_differ_has_no_majority() -> None:
    with running_front(lambda request: [*b"%d" % (request.params.seed or 0), END]) as front:
        vote = {"samples": 5, "regex": r"\d+"}
        for path, sent in ((CHAT, body(seed=1)), (COMPLETIONS, {"model": MODEL, "prompt": "a", "seed": 1})):
            found = post(front.port, path, {**sent, "self_consistency": vote}).json["vote"]
            assert (found["votes"], found["samples"], found["majority"]) == (1, 5, False)


@pytest.mark.parametrize(
    ("fields", "votes", "is_one"), [("aabbc", 2, False), ("aabcd", 2, False), ("ab", 1, False), ("aab", 2, True)]
)
def test_a_majority_is_more_than_half(fields: str, votes: int, is_one: bool) -> None:
    _, ballot = held([(one, -1.0) for one in fields], SelfConsistency(samples=len(fields), regex="."))
    assert (ballot.votes, ballot.has_majority) == (votes, is_one)


def test_a_prediction_becomes_token_ids(front: Front) -> None:
    for content in ("abc", [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]):
        reply = post(front.port, CHAT, body(prediction={"type": "content", "content": content}))
        assert reply.status == 200, reply.json
        assert front.engine.received[-1].params.prediction == (97, 98, 99)


def test_a_suffix_is_refused_by_models_without_the_tokens(front: Front) -> None:
    reply = post(front.port, COMPLETIONS, {"model": MODEL, "prompt": "a", "suffix": "b"})
    assert reply.status == 400
    assert (reply.json["error"]["param"], reply.json["error"]["code"]) == ("suffix", "unsupported_parameter")


def test_prompt_logprobs_come_before_the_text_of_a_stream(front: Front) -> None:
    whole = post(front.port, CHAT, body(prompt_logprobs=1)).json
    chunks = stream(front.port, CHAT, body(prompt_logprobs=1, stream=True))
    described = [chunk for chunk in chunks if "prompt_logprobs" in chunk]
    assert [chunk["prompt_logprobs"] for chunk in described] == [whole["prompt_logprobs"]]
    assert chunks.index(described[0]) < 2
    assert chat_text(chunks) == "Hello"
    asked = {"model": MODEL, "prompt": ["ab", "cd"], "prompt_logprobs": 0}
    whole = post(front.port, COMPLETIONS, asked).json
    chunks = stream(front.port, COMPLETIONS, {**asked, "stream": True})
    found = {one["index"]: one["prompt_logprobs"] for c in chunks for one in c["choices"] if "prompt_logprobs" in one}
    assert found == {one["index"]: one["prompt_logprobs"] for one in whole["choices"]}


# ── beams ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_beams_over_http(front: Front) -> None:
    """The null engine ranks token 0 … after its own token, always alike: what is best follows by arithmetic."""
    before = len(front.engine.received)
    sent = body(num_beams=2, n=2, max_tokens=3, logprobs=True, return_token_ids=True)
    answer = post(front.port, CHAT, sent).json
    steps = front.engine.received[before:]
    assert [len(unpack_tokens(step.prompt)) for step in steps] == [20, 21, 21, 22, 22]
    assert all(step.params.max_tokens == 1 and step.params.logprobs == 3 for step in steps)
    first, second = answer["choices"]
    assert len(first["token_ids"]) == len(first["logprobs"]["content"]) == 3
    assert first["token_ids"] != second["token_ids"]
    assert first["finish_reason"] == "length"
    scores = [sum(entry["logprob"] for entry in one["logprobs"]["content"]) for one in (first, second)]
    assert scores[0] >= scores[1]
    chunks = stream(front.port, CHAT, {**sent, "stream": True})
    assert chat_text(chunks) == first["message"]["content"]
    reply = post(front.port, COMPLETIONS, {"model": MODEL, "prompt": "a", "use_beam_search": True, "n": 2})
    assert len(reply.json["choices"]) == 2


def test_beams_that_do_not_fit_or_fail(front: Front) -> None:
    reply = post(front.port, CHAT, body(num_beams=2, max_tokens=10**6))
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert reply.json["error"]["param"] == "max_tokens"
    reply = post(front.port, CHAT, body(num_beams=2, temperature=0.5))
    assert reply.json["error"]["param"] == "temperature"


def test_logits_processors_need_permission(front: Front) -> None:
    reply = post(front.port, CHAT, body(logits_processors=["os.system"]))
    assert (reply.status, reply.json["error"]["param"]) == (400, "logits_processors")
    config = replace(Config(), server__port=0, server__allow_logits_processors="my.module.f, my.module.g")
    with running_front(saying("x"), config=config) as allowing:
        assert post(allowing.port, CHAT, body(logits_processors=["my.module.g"])).status == 200
        assert allowing.engine.received[-1].params.logits_processors == ("my.module.g",)
        assert post(allowing.port, CHAT, body(logits_processors=["my.module.h"])).status == 400


def test_a_drafter_that_the_engine_does_not_offer_is_refused(front: Front) -> None:
    for name in ("auto", "off"):
        assert post(front.port, CHAT, body(speculate=name)).status == 200
        assert front.engine.received[-1].params.speculate == name
    reply = post(front.port, CHAT, body(speculate="suffix"))
    assert (reply.status, reply.json["error"]["param"]) == (400, "speculate")
    assert "offers auto, off." in reply.json["error"]["message"]
    assert post(front.port, CHAT, body(speculate="magic")).status == 400


def test_a_limit_on_reasoning_is_refused_with_beams() -> None:
    with pytest.raises(BadRequest, match="reasoning") as caught:
        check_beams(BeamParams(num_beams=2), SamplingParams(thinking=ThinkingLimit(9, 1, 2, False)), 1)
    assert caught.value.param == "reasoning_effort"


def test_a_vote_is_over_the_answers_to_one_prompt(voters: Front) -> None:
    vote = {"samples": 3, "regex": "7"}
    reply = post(voters.port, COMPLETIONS, {"model": MODEL, "prompt": ["a", "b"], "self_consistency": vote})
    assert (reply.status, reply.error["param"]) == (400, "self_consistency")


def held(answers: list[tuple[str, float]], vote: SelfConsistency) -> tuple[str, Ballot]:
    """The text that won among answers of these log-probabilities, and how."""
    outputs = [Output([text], logprobs=[TokenLogprobs(1, logprob, 1, (), ())]) for text, logprob in answers]
    choices = [SimpleNamespace(output=output) for output in outputs]
    winner, ballot = elect(cast("list[CollectedChoice]", choices), vote)
    return winner.output.text, ballot


def test_an_answer_without_the_field_does_not_win_a_vote_for_empty_fields() -> None:
    text, ballot = held([("x=", -1.0), ("x=", -1.0), ("none", 0.0)], SelfConsistency(samples=3, regex="x=(.*)"))
    assert (text, ballot.value, ballot.votes) == ("x=", "", 2)


def test_values_that_are_equal_in_json_agree() -> None:
    path = SelfConsistency(samples=4, json_path="$.a")
    same = [('{"a": 7}', -3.0), ('{"a": 7.0}', -2.0), ('{"a": "7"}', -4.0), ('{"a": 8}', 0.0)]
    assert held(same, path) == ('{"a": 7.0}', Ballot("7", 3, 4))
    ordered = [('{"a": {"x": 1, "y": 2}}', -1.0), ('{"a": {"y": 2, "x": 1}}', -2.0), ('{"a": null}', 0.0)]
    assert held(ordered, path) == (ordered[0][0], Ballot('{"x":1,"y":2}', 2, 3))
    # Of two equally frequent values, that of the likelier answer.
    assert held([('{"a": 1}', -2.0), ('{"a": 2}', -1.0)], path) == ('{"a": 2}', Ballot("2", 1, 2))


@pytest.mark.parametrize("broken", ["[" * 9000, "[" * 9000 + "]" * 9000, "{", '{"a": 1e999}', '{"b": 1}', "[1]", "7"])
def test_an_answer_that_is_not_such_json_has_no_vote(broken: str) -> None:
    text, ballot = held([(broken, 0.0), ('{"a": 1e300}', -9.0)], SelfConsistency(samples=2, json_path="a"))
    assert (text, ballot.votes) == ('{"a": 1e300}', 1)


def test_a_slow_pattern_costs_a_vote_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def slow(pattern: str, text: str, *, timeout: float) -> list[str]:
        asked.append(timeout)
        clock[0] += timeout
        raise TimeoutError

    clock = [100.0]
    monkeypatch.setattr("regex.findall", slow)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    _, ballot = held([("aaa", -1.0)] * 128, SelfConsistency(samples=128, regex="x"))
    monkeypatch.undo()
    assert (ballot.votes, sum(asked)) == (0, pytest.approx(MATCH_S))
