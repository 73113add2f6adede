"""Did the protocol hold? Looks at a wire log; what the model said does not matter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from agents.wire_log import Exchange

MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
ENDS = {
    MESSAGES: ("message_stop",),
    CHAT: ("[DONE]",),
    RESPONSES: ("response.completed", "response.incomplete"),
}
"""The last event of a stream that ended well, by path."""
PROBES = {("HEAD", "/"), ("GET", "/v1/models")}
"""Requests whose errors the agents expect and handle."""


def problems(exchanges: Sequence[Exchange]) -> list[str]:
    """What went wrong, in sentences; nothing if the protocol held."""
    found = [problem for number, one in enumerate(exchanges) for problem in _of_one(number, one)]
    if not any(one.path in ENDS for one in exchanges):
        found.append("The agent sent no request to a model.")
    answered: set[str] = set()
    for one in reversed(exchanges):
        lost = sorted(call for call in calls(one) if call not in answered)
        # After the last answer the agent may have reached its limit of turns.
        if lost and one is not exchanges[-1]:
            found.append(f"The results of the tool calls {', '.join(lost)} never came back.")
        answered |= results(one)
    return found


def _of_one(number: int, one: Exchange) -> Iterator[str]:
    name = f"Request {number} ({one.method} {one.path})"
    if one.was_left:
        yield f"{name}: the agent gave up after {one.took_s:.0f} s."
    elif one.status == 0 or (one.status >= 400 and (one.method, one.path) not in PROBES):
        yield f"{name} was answered with {one.status or 'nothing'}: {one.answer[:300].decode('utf-8', 'replace')}"
    elif one.is_stream and one.path in ENDS:
        said = events(one)
        last = _kind(said[-1]) if said else "nothing"
        if last not in ENDS[one.path]:
            yield f"{name}: the stream ended with {last}."
        if any(_kind(event) in ("error", "response.failed") or "error" in event for event in said[:-1]):
            yield f"{name}: an error is in the stream."


def events(one: Exchange) -> list[dict[str, Any]]:
    """Data of a stream; chat's end mark as an event of its own."""
    lines = one.answer.decode("utf-8", "replace").splitlines()
    said = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [{"type": "[DONE]"} if text == "[DONE]" else json.loads(text) for text in said]


def _kind(event: dict[str, Any]) -> str:
    return str(event.get("type", "chunk"))


def calls(one: Exchange) -> set[str]:
    """Ids of the tool calls in an answer."""
    if one.path not in ENDS or one.status != 200:
        return set()
    if one.is_stream:
        return set(_streamed_calls(one))
    return set(_ids(json.loads(one.answer or b"{}"), ("tool_use", "function_call", "custom_tool_call", "function")))


def _streamed_calls(one: Exchange) -> Iterator[str]:
    for event in events(one):
        block = event.get("content_block") or event.get("item") or {}
        if block.get("type") == "tool_use":
            yield block["id"]
        elif block.get("type") in ("function_call", "custom_tool_call"):
            yield block["call_id"]
        for choice in event.get("choices", ()):
            yield from (call["id"] for call in choice.get("delta", {}).get("tool_calls") or () if call.get("id"))


def _ids(value: Any, kinds: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("type") in kinds and ("call_id" in value or "id" in value):
            yield value.get("call_id") or value["id"]
        for part in value.values():
            yield from _ids(part, kinds)
    elif isinstance(value, list):
        for part in value:
            yield from _ids(part, kinds)


def results(one: Exchange) -> set[str]:
    """Ids of the tool calls whose results are in a request."""
    if one.path not in ENDS or not isinstance(one.body, dict):
        return set()
    found = set()
    for item in one.body.get("messages") or one.body.get("input") or ():
        if not isinstance(item, dict):
            continue
        if item.get("role") == "tool":
            found.add(item["tool_call_id"])
        if item.get("type") in ("function_call_output", "custom_tool_call_output"):
            found.add(item["call_id"])
        blocks = item.get("content")
        for block in blocks if isinstance(blocks, list) else ():
            if block.get("type") == "tool_result":
                found.add(block["tool_use_id"])
    return found
