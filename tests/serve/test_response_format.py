"""`response_format`: grammars reach the engine, wrong schemas are refused before anything is generated."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import post

from millrace.link.messages import NewRequest
from millrace.params.grammar import MAX_GRAMMAR_BYTES, Grammar
from millrace.serve.generate import grammars
from millrace.text.grammar.compiler import NUM_THREADS, GrammarCompiler

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Ann", "age": 3}'


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(ANSWER)) as front:
        yield front


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def sent_grammar(front: Front) -> Grammar | None:
    return front.engine.received[-1].params.grammar


def test_text_sends_no_grammar(front: Front) -> None:
    assert post(front.port, CHAT, body(response_format={"type": "text"})).status == 200
    assert sent_grammar(front) is None


def test_json_object_reaches_the_engine(front: Front) -> None:
    reply = post(front.port, CHAT, body(response_format={"type": "json_object"}))
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == ANSWER
    assert sent_grammar(front) == Grammar("json_object")


@pytest.mark.parametrize("fields", [{}, {"strict": True}, {"strict": False}, {"strict": None, "description": "x"}])
def test_a_schema_reaches_the_engine_as_written(front: Front, fields: dict[str, Any]) -> None:
    assert post(front.port, CHAT, body(response_format=json_schema(PERSON, **fields))).status == 200
    grammar = sent_grammar(front)
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert list(json.loads(grammar.source)["properties"]) == ["name", "age"]


def test_every_choice_carries_the_grammar(front: Front) -> None:
    before = len(front.engine.received)
    reply = post(front.port, CHAT, body(response_format=json_schema(PERSON), n=3, logprobs=True))
    assert reply.status == 200
    assert len(reply.json["choices"]) == 3
    assert [request.params.grammar is None for request in front.engine.received[before:]] == [False] * 3


def test_it_streams(front: Front) -> None:
    reply = post(front.port, CHAT, body(response_format=json_schema(PERSON), stream=True))
    assert reply.status == 200
    assert b"[DONE]" in reply.body
    assert sent_grammar(front) is not None


REFUSED = [
    (json_schema({"not": {"type": "string"}}), "'not', which is not supported"),
    (json_schema({"type": "array", "uniqueItems": True}), "'uniqueItems'"),
    (json_schema({"type": "objekt"}), "objekt"),
    (json_schema({"type": "string", "format": "iri"}), "'iri'"),
    (json_schema({"type": "string", "pattern": "(("}), "unclosed group"),
    (json_schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "'anyOf'"),
    (json_schema({"$ref": "https://example.com/schema.json"}), "example.com"),
    (json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    (json_schema({"type": "object", "x-guidance": {"lenient": True}}), "x-guidance"),
    (json_schema([]), "not a JSON object"),
    (json_schema(None), "not a JSON object"),
    (json_schema({"description": "x" * MAX_GRAMMAR_BYTES}), str(MAX_GRAMMAR_BYTES)),
]


@pytest.mark.parametrize(("response_format", "said"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_schema_is_refused_before_the_stream(
    front: Front, response_format: dict[str, Any], said: str, stream: bool
) -> None:
    before = len(front.engine.received)
    reply = post(front.port, CHAT, body(response_format=response_format, stream=stream))
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["param"] == "response_format"
    assert said in error["message"]
    assert len(front.engine.received) == before


def test_a_deep_schema_is_refused(front: Front) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    reply = post(front.port, CHAT, body(response_format=json_schema(deep)))
    assert reply.status == 400
    assert "nested too deeply" in reply.json["error"]["message"]


def test_a_schema_that_is_not_utf8_is_refused(front: Front) -> None:
    data = body(response_format=json_schema({"const": "MARK"})).replace(b"MARK", b"\xff")
    assert post(front.port, CHAT, data).status == 400


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_an_answer_that_must_go_on_still_ends(front: Front, fields: dict[str, Any]) -> None:
    """Benchmarks send these with a schema: the engine gets the end tokens, which the grammar then needs."""
    reply = post(front.port, CHAT, body(response_format={"type": "json_object"}, **fields))
    assert reply.status == 200
    asked = [message for message in front.engine.received if isinstance(message, NewRequest)][-1]
    assert asked.end_token_ids


def test_a_missing_schema_is_named(front: Front) -> None:
    reply = post(front.port, CHAT, body(response_format={"type": "json_schema", "json_schema": {"name": "x"}}))
    assert reply.status == 400
    assert reply.json["error"]["param"] == "response_format.json_schema.schema"


def test_the_same_schema_is_checked_once(front: Front) -> None:
    """Good and bad results are both remembered."""
    compiled = front.state.grammar_check.num_compiled
    for wanted in (PERSON | {"title": "once"}, {"not": {}, "title": "once"}):
        answers = {post(front.port, CHAT, body(response_format=json_schema(wanted))).status for _ in range(3)}
        assert len(answers) == 1
    assert front.state.grammar_check.num_compiled == compiled + 2


def test_a_slow_check_stalls_no_other_request(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    is_checking, is_over = threading.Event(), threading.Event()

    def wait(grammar: Grammar) -> None:
        is_checking.set()
        is_over.wait(60)

    monkeypatch.setattr(front.state, "grammar_check", GrammarCompiler(wait))
    monkeypatch.setattr(grammars, "CHECK_LIMIT_S", 60.0)
    with ThreadPoolExecutor(1) as other:
        checked = other.submit(post, front.port, CHAT, body(response_format=json_schema(PERSON)))
        assert is_checking.wait(60)
        assert post(front.port, CHAT, body()).status == 200
        assert not checked.done()
        is_over.set()
        assert checked.result(60).status == 200
    front.state.grammar_check.close()


def test_a_grammar_behind_slow_ones_is_not_blamed(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def wait(grammar: Grammar) -> None:
        is_over.wait(60)

    monkeypatch.setattr(front.state, "grammar_check", GrammarCompiler(wait))
    monkeypatch.setattr(grammars, "CHECK_LIMIT_S", 0.2)
    wanted = [json_schema({"const": number}) for number in range(NUM_THREADS + 1)]
    replies = [post(front.port, CHAT, body(response_format=one)) for one in wanted]
    is_over.set()
    assert [reply.status for reply in replies] == [400] * NUM_THREADS + [429]
    assert int(replies[-1].headers["retry-after"]) > 0
    front.state.grammar_check.close()
