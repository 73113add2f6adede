"""A call on a real engine whose model has Qwen3's markers, which are added tokens without the flag of special ones.

A random model has no wish of its own: a bias makes it draw the markers wherever the grammar's mask allows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from contract.real_server import TINY, RealServer, real_server
from helpers.marker_shapes import tokenizer_of
from serve.wire import CHAT, post

from millrace.text.tokenizers.tokenizer import Tokenizer

pytestmark = pytest.mark.live

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Tokenizer]]:
    directory = tmp_path_factory.mktemp("qwen3")
    tokenizer = tokenizer_of(directory, "qwen3", "added")
    options = (f"random:{directory / 'config.json'}", "--served-name", TINY, "--dtype", "float32", "--threads", "1")
    with real_server(*options, "--kv-tokens", "8192", "--data-dir", str(directory / "data")) as server:
        yield server, tokenizer


def answer(model: tuple[RealServer, Tokenizer], *markers: str, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """The answer's choice, and the tokens that were drawn. The bias is on the markers."""
    server, tokenizer = model
    bias = {str(tokenizer.token_id(marker)): 100 for marker in markers}
    body = {"model": TINY, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 120, "logprobs": True}
    reply = post(server.port, CHAT, {**body, "seed": 1, "logit_bias": bias, **fields})
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    return choice, [token["token"] for token in choice["logprobs"]["content"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "auto"},
    ],
)
def test_the_marker_is_drawn_and_the_arguments_follow_the_schema(
    model: tuple[RealServer, Tokenizer], fields: dict[str, Any]
) -> None:
    function = {"name": "weather", "parameters": SCHEMA, "strict": fields["tool_choice"] == "auto"}
    tools = [{"type": "function", "function": function}]
    markers = ("<tool_call>", "</tool_call>")
    choice, drawn = answer(model, *markers, tools=tools, parallel_tool_calls=False, **fields)
    assert drawn[0] == "<tool_call>"
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_reasoning_ends_with_its_marker_and_the_answer_follows_the_schema(model: tuple[RealServer, Tokenizer]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    choice, drawn = answer(model, "<think>", "</think>", response_format=wanted)
    assert drawn[0] == "<think>"
    assert "</think>" in drawn
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
