"""`bad_words` and `allowed_token_ids` through the engine: drafts, streams and neighbours change no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.tiny_models import config_of, make_reference

from millrace import LLM, SamplingParams
from millrace.engine.fronts.requests import to_request
from millrace.errors import BadRequest
from millrace.link.messages import NewRequest, pack_tokens
from millrace.params.grammar import Grammar
from millrace.run.facts import RunnerFacts

PROMPT = "abcabcabcabc"
LETTERS = tuple(b"abcdefgh")
FREE: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "allowed_token_ids": LETTERS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("random") / "config.json"
    path.write_text(json.dumps(config_of(make_reference("llama", vocab_size=300))))
    return f"random:{path}"


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, device="cpu", dtype="float32", kv_tokens=1024, speculate="ngram", draft_tokens=3) as opened:
        yield opened


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "seeded"])
def test_answers_follow_both(llm: LLM, how: dict[str, Any]) -> None:
    (plain,) = llm.generate(PROMPT, **FREE, **how)
    assert set(plain.token_ids) <= set(LETTERS)
    assert len(plain.token_ids) == 48
    pair, single = plain.text[3:5], plain.text[0]
    (without,) = llm.generate(PROMPT, **FREE, **how, bad_words=[pair])
    assert pair not in without.text
    begin = plain.text.index(pair) + 1
    assert without.text[:begin] == plain.text[:begin]
    (never,) = llm.generate(PROMPT, **FREE, **how, bad_words=single)
    assert single not in never.text

    fields: dict[str, Any] = {**FREE, **how, "bad_words": (pair,)}
    assert llm.stream(PROMPT, **fields).text() == without.text
    (undrafted,) = llm.generate(PROMPT, **fields, speculate="off")
    (predicted,) = llm.generate(PROMPT, **fields, prediction=tuple(plain.token_ids))
    assert undrafted.text == predicted.text == without.text
    other = SamplingParams(max_tokens=48, ignore_eos=True, **how)
    (alone,) = llm.generate(PROMPT, other)
    found = llm.generate([PROMPT] * 3, [other, SamplingParams(**fields), other])
    assert [one.token_ids for one in found] == [alone.token_ids, without.token_ids, alone.token_ids]


def test_an_answer_ends_only_with_an_allowed_token(llm: LLM) -> None:
    end = llm.tokenizer.end_token_ids[0]
    (ended,) = llm.generate(PROMPT, max_tokens=3, allowed_token_ids=[end])
    assert ended.choices[0].finish_reason == "stop"
    (full,) = llm.generate(PROMPT, max_tokens=3, allowed_token_ids=[97], logit_bias={end: 100})
    assert (full.text, full.choices[0].finish_reason) == ("aaa", "length")
    with pytest.raises(BadRequest, match="min_tokens forbids"):
        llm.generate(PROMPT, max_tokens=3, min_tokens=1, allowed_token_ids=[end])
    with pytest.raises(BadRequest, match="names token id 300"):
        llm.generate(PROMPT, max_tokens=3, allowed_token_ids=[300])


def test_a_grammar_comes_before_bad_words(llm: LLM) -> None:
    either = Grammar("choice", json.dumps(["ab", "cd"]))
    (other,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, grammar=either, bad_words=("ab",)))
    (forced,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, grammar=either, bad_words=("b", "d")))
    assert other.text in ("ab", "cd")
    assert forced.text in ("ab", "cd")  # the second letter is forced
    (chosen,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, grammar=either, bad_words=("a",)))
    assert chosen.text == "cd"


@pytest.mark.parametrize("verifies_adjusted", [True, False])
@pytest.mark.parametrize(
    ("fields", "can_draft"),
    [({}, True), ({"bad_word_ids": ((97,),)}, False), ({"allowed_token_ids": (1,), "temperature": 0.0}, False)],
    ids=["plain", "bad words", "allowed"],
)
def test_such_rows_verify_no_drafts(verifies_adjusted: bool, fields: dict[str, Any], can_draft: bool) -> None:
    params = SamplingParams(max_tokens=4, **fields)
    facts = RunnerFacts(verifies_adjusted=verifies_adjusted)
    request = to_request(NewRequest(id=1, prompt=pack_tokens([1, 2]), params=params), facts)
    assert request.can_draft == can_draft
