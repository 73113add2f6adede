"""Every field that says what an answer must conform to, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import Reply, post, request

from millrace.params.grammar import Grammar

pytestmark = pytest.mark.live

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 20},
    OLLAMA_CHAT: {"messages": USER, "stream": False},
    OLLAMA_GENERATE: {"prompt": "hi", "stream": False},
}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
TEXT = json.dumps(SCHEMA)
LARK, GBNF = 'start: "a" start | "b"', 'root ::= "a" root | "b"'
OPENAI_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
RESPONSES_SCHEMA = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": False}
ANTHROPIC_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
CLOSED = json.dumps({**SCHEMA, "additionalProperties": False})
AS_SCHEMA, AS_OBJECT = Grammar("json_schema", CLOSED), Grammar("json_object")


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("{}")) as front:
        yield front


def ask(front: Front, path: str, fields: dict[str, Any]) -> Reply:
    return post(front.port, path, json.dumps({"model": MODEL, **BASE[path], **fields}).encode())


SHARED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": OPENAI_SCHEMA}, AS_SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_SCHEMA),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, AS_SCHEMA),
    ({"response_format": {"type": "json_object", "value": SCHEMA, "schema": None}}, AS_SCHEMA),
    ({"response_format": {"type": "json_object", "value": None}}, AS_OBJECT),
    ({"response_format": {"type": "json_object", "schema": {}}}, AS_OBJECT),
    ({"response_format": {"type": "json_object", "schema": None}}, AS_OBJECT),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": TEXT}}, AS_SCHEMA),
    ({"structured_outputs": {"json_object": True, "regex": None}}, AS_OBJECT),
    ({"structured_outputs": {"regex": "[ab]+"}}, Grammar("regex", "[ab]+")),
    ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar("choice", '["é","b"]')),
    ({"structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
    ({"structured_outputs": {"grammar": GBNF}}, Grammar("gbnf", GBNF)),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        Grammar("json_schema", CLOSED, whitespace=" ?"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        AS_SCHEMA,
    ),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, AS_SCHEMA),
    ({"guided_json": TEXT, "guided_whitespace_pattern": None}, AS_SCHEMA),
    ({"guided_json_object": True}, AS_OBJECT),
    ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": GBNF}, Grammar("gbnf", GBNF)),
    ({"guided_json": None, "guided_regex": None, "structured_outputs": None}, None),
]
OTHERS: list[tuple[str, dict[str, Any], Grammar | None]] = [
    (RESPONSES, {"text": {"format": {"type": "text"}}}, None),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, AS_OBJECT),
    (RESPONSES, {"text": {"format": RESPONSES_SCHEMA}}, AS_SCHEMA),
    (MESSAGES, {"output_config": {}}, None),
    (MESSAGES, {"output_config": {"format": ANTHROPIC_SCHEMA}}, AS_SCHEMA),
    (MESSAGES, {"output_format": ANTHROPIC_SCHEMA}, AS_SCHEMA),
    *(
        (path, {"format": given}, wanted)
        for path in (OLLAMA_CHAT, OLLAMA_GENERATE)
        for given, wanted in ((None, None), ("", None), ("json", AS_OBJECT), (SCHEMA, AS_SCHEMA))
    ),
]
ACCEPTED = [(path, fields, wanted) for path in (CHAT, COMPLETIONS) for fields, wanted in SHARED] + OTHERS


@pytest.mark.parametrize(("path", "fields", "wanted"), ACCEPTED)
def test_a_format_reaches_the_engine(front: Front, path: str, fields: dict[str, Any], wanted: Grammar | None) -> None:
    reply = ask(front, path, fields)
    assert reply.status == 200, reply.body
    sent = front.engine.received[-1].params.grammar
    if sent is not None and sent.kind == "json_schema":  # The spelling of the schema is the client's.
        assert json.loads(sent.source) == json.loads(wanted.source if wanted else "")
        assert wanted is not None
        assert sent.whitespace == wanted.whitespace
    else:
        assert sent == wanted


NOT = {"not": {}}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": NOT}}}, "text.format", "'not'"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": NOT}}}, "output_config.format", "'not'"),
    (
        MESSAGES,
        {"output_config": {"format": ANTHROPIC_SCHEMA}, "output_format": ANTHROPIC_SCHEMA},
        "output_format",
        "'output_config.format' and 'output_format'",
    ),
    (OLLAMA_CHAT, {"format": NOT}, "format", "'not'"),
    (OLLAMA_CHAT, {"format": "yaml"}, "format", "neither"),
    (OLLAMA_GENERATE, {"format": [1]}, "format", "neither"),
    (COMPLETIONS, {"guided_json": NOT}, "guided_json", "'not'"),
    (COMPLETIONS, {"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    (COMPLETIONS, {"guided_choice": []}, "guided_choice", "empty"),
    (CHAT, {"guided_grammar": 'start ::= "a"'}, "guided_grammar", "root"),
    (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only with JSON"),
    (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "'guided_regex' and 'guided_choice'"),
    (
        CHAT,
        {"response_format": OPENAI_SCHEMA, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
        "'response_format' and 'structured_outputs.regex'",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object", "value": SCHEMA, "schema": SCHEMA}},
        "response_format.value",
        "'schema' and 'value'",
    ),
    (CHAT, {"response_format": {"type": "json_object", "value": NOT}}, "response_format", "'not'"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "no constraint"),
    (CHAT, {"structured_outputs": {"json_object": False}}, "structured_outputs", "no constraint"),
    (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not a JSON object"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    (CHAT, {"structured_outputs": {"regexp": "x"}}, "structured_outputs.regexp", "regexp"),
    (
        CHAT,
        {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "only with a schema",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "said"), REFUSED)
def test_what_cannot_be_held_is_refused_by_name(
    front: Front, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    before = len(front.engine.received)
    reply = ask(front, path, {**fields, "stream": True})
    assert reply.status == 400, reply.body
    error = reply.json if path.startswith("/api/") else reply.json["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert len(front.engine.received) == before


def test_a_response_says_which_format_it_has(front: Front) -> None:
    for sent, shown in (
        ({}, {"type": "text"}),
        ({"text": {"format": {"type": "json_object"}}}, {"type": "json_object"}),
        ({"text": {"format": RESPONSES_SCHEMA}}, {**RESPONSES_SCHEMA, "description": None}),
    ):
        answer = ask(front, RESPONSES, sent).json
        assert answer["text"]["format"] == shown
        stored = request(front.port, "GET", f"/v1/responses/{answer['id']}").json
        assert stored["text"]["format"] == shown
