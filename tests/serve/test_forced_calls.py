"""Calls that are required, named or strict reach the engine as one grammar; wrong schemas are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import Reply, post

from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.tools.formats import FORMATS, Function
from millrace.text.tools.grammar import forced_calls, strict_calls

pytestmark = pytest.mark.live

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')) as front:
        yield front


def chat(front: Front, **fields: Any) -> Reply:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    return post(front.port, "/v1/chat/completions", body)


def sent(front: Front) -> Grammar | None:
    return front.engine.received[-1].params.grammar


def test_the_choice_decides_the_grammar(front: Front) -> None:
    assert chat(front).status == 200
    assert sent(front) is None
    assert chat(front, tool_choice="required").status == 200
    grammar = sent(front)
    assert grammar is not None
    assert "get_weather" in grammar.source
    assert "{0,7}" in grammar.source
    assert chat(front, tool_choice=NAMED).json["choices"][0]["finish_reason"] == "tool_calls"
    grammar = sent(front)
    assert grammar is not None
    assert "get_weather" not in grammar.source
    assert "{0," not in grammar.source


def test_strict_functions_are_held_to_their_schema_after_the_opening(front: Front) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    assert chat(front, tools=tools).status == 200
    grammar = sent(front)
    assert grammar is not None
    assert "free[lazy]" in grammar.source


def test_a_format_and_tools_make_one_grammar(front: Front) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert chat(front, response_format=wanted).status == 200
    grammar = sent(front)
    assert grammar is not None
    assert grammar.source.startswith("start: answer |")
    reply = chat(front, structured_outputs={"regex": "a+"})
    assert reply.error["param"] == "structured_outputs.regex"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
def test_a_wrong_schema_is_refused(front: Front, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "x"}}}}}]
    reply = chat(front, tools=tools, tool_choice=choice)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "tools", "invalid_schema")


def test_other_dialects_force_calls(front: Front) -> None:
    tool = {"name": "now", "input_schema": {}}
    messages = [{"role": "user", "content": "hi"}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
        body = {"model": MODEL, "max_tokens": 99, "messages": messages, "tools": [tool], "tool_choice": choice}
        assert post(front.port, "/v1/messages", body).json["stop_reason"] == "tool_use"
        assert sent(front) is not None
    for choice in ("required", {"type": "function", "name": "now"}):
        body = {"input": "hi", "tools": [{"type": "function", "name": "now"}], "tool_choice": choice}
        assert post(front.port, "/v1/responses", body).json["output"][0]["name"] == "now"
        assert sent(front) is not None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_special_tokens_are_matched_by_id(name: str) -> None:
    spec = FORMATS[name]
    functions = [Function("f", None, SCHEMA, is_strict=True)]
    source = forced_calls(spec, functions, lambda text: 7, max_calls=1)
    assert ("<[7]>" in source) == (name not in ("llama3", "json", "pythonic"))
    auto = strict_calls(spec, functions, lambda text: 7, max_calls=1)
    assert (auto is None) == (name in ("llama3", "json", "minicpm5", "pythonic"))


@pytest.mark.parametrize(("name", "argument"), [("get-weather", "city"), ("f", "zip-code"), ("f", "from")])
def test_names_that_python_does_not_allow_are_refused_where_calls_are_python(name: str, argument: str) -> None:
    functions = [Function(name, parameters={"type": "object", "properties": {argument: {}}})]
    with pytest.raises(GrammarError, match="no name in Python"):
        forced_calls(FORMATS["pythonic"], functions, lambda text: None, max_calls=1)
    assert forced_calls(FORMATS["hermes"], functions, lambda text: None, max_calls=1)
