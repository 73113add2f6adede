"""Requests that coding agents sent, replayed: the server takes each, and the dialect's SDK reads the stream.

`record.py` made the files in `recorded/` from wire logs of `make test-agents`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agents.verdict import CHAT, MESSAGES, RESPONSES
from anthropic.types import RawMessageStreamEvent
from helpers.served import serving
from helpers.tiny_server import NAME, tiny_options
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from serve.front_under_test import MODEL, running_front, saying

pytestmark = pytest.mark.live

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
REQUESTS = [
    pytest.param(request, id=f"{file.stem}-{number}")
    for file in RECORDED
    for number, request in enumerate(json.loads(file.read_text(encoding="utf-8")))
]
MAX_TOKENS = 16
"""The agents ask for thousands; a model of random weights would write them all."""


@pytest.fixture(scope="module")
def tiny_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a tiny model of random weights."""
    with serving(*tiny_options(tmp_path_factory.mktemp("tiny"))) as served:
        yield f"http://127.0.0.1:{served.port}"


def replayed(url: str, request: dict[str, Any], model: str, max_tokens: int = MAX_TOKENS) -> list[Any]:
    """The events of the stream, as the SDK of the dialect reads them."""
    path, limit = request["path"], "max_output_tokens" if request["path"] == RESPONSES else "max_tokens"
    body = {**request["body"], "model": model, limit: max_tokens}
    options: Any = {"headers": request["headers"]}
    if path == MESSAGES:
        claude = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
        kind: Any = anthropic.Stream[RawMessageStreamEvent]
        return list(claude.post(path, body=body, cast_to=object, options=options, stream=True, stream_cls=kind))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    kind = openai.Stream[ChatCompletionChunk if path == CHAT else ResponseStreamEvent]
    path = path.removeprefix("/v1")
    return list(client.post(path, body=body, cast_to=object, options=options, stream=True, stream_cls=kind))


@pytest.mark.parametrize("request_", REQUESTS)
def test_the_server_takes_the_request_and_the_stream_ends_well(request_: dict[str, Any], tiny_url: str) -> None:
    events = replayed(tiny_url, request_, NAME)
    if request_["path"] == CHAT:
        reasons = [choice.finish_reason for chunk in events for choice in chunk.choices if choice.finish_reason]
        assert len(reasons) == 1
        assert events[-1].usage.total_tokens > MAX_TOKENS
    elif request_["path"] == MESSAGES:
        assert next(event.type for event in events if event.type != "ping") == "message_start"
        assert events[-1].type == "message_stop"
    else:
        assert events[0].type == "response.created"
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.usage.total_tokens > MAX_TOKENS


def first_tool(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name of a tool that the model may call, and arguments of the types that its schema requires."""
    tool = next(one.get("function", one) for one in body["tools"] if not one.get("defer_loading"))
    schema = tool.get("parameters") or tool["input_schema"]
    values = {"string": "x", "number": 1, "integer": 1, "boolean": True, "array": [], "object": {}}
    kinds = {name: schema["properties"][name].get("type", "string") for name in schema.get("required", ())}
    return tool["name"], {name: values[kind] for name, kind in kinds.items()}


@pytest.mark.parametrize("request_", [param for param in REQUESTS if param.values[0]["body"].get("tools")])
def test_a_call_of_the_agents_tools_reaches_it(request_: dict[str, Any]) -> None:
    name, arguments = first_tool(request_["body"])
    said = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    with running_front(saying(said), max_context=65536) as front:
        events = replayed(front.url, request_, MODEL, max_tokens=2000)
    assert called(events, request_["path"]) == [(name, arguments)]


def called(events: list[Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in a stream."""
    if path == CHAT:
        parts = [part for chunk in events for one in chunk.choices for part in one.delta.tool_calls or ()]
        named = [part.function.name for part in parts if part.function.name]
        return [(named[0], json.loads("".join(part.function.arguments or "" for part in parts)))] if named else []
    if path == MESSAGES:
        starts = [event.content_block for event in events if event.type == "content_block_start"]
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        written = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
        return [(block.name, json.loads(written)) for block in starts if block.type == "tool_use"]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    return [(item.name, json.loads(item.arguments)) for item in items if item.type == "function_call"]
