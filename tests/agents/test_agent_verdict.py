"""The verdict of `make test-agents` on wire logs that are good, and on each way in which they can be bad."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents.try_agents import MAX_TOKENS, MAX_TURNS, ShortAnswers, place_for_homes
from agents.verdict import CHAT, MESSAGES, RESPONSES, calls, problems, results
from agents.wire_log import Exchange


def streamed(path: str, body: dict[str, Any], *events: dict[str, Any] | str) -> Exchange:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    answer = "".join(f": waiting\n\ndata: {one}\n\n" for one in data).encode()
    return Exchange("POST", path, {}, body, 200, is_stream=True, answer=answer)


def message_log() -> list[Exchange]:
    use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    later = {"messages": [*asked["messages"], {"role": "user", "content": [result]}]}
    end = {"type": "message_stop"}
    return [
        streamed(MESSAGES, asked, {"type": "content_block_start", "content_block": use}, end),
        streamed(MESSAGES, later, end),
    ]


def chat_log() -> list[Exchange]:
    call = {"index": 0, "id": "call_1", "function": {"name": "run", "arguments": ""}}
    later = {"messages": [{"role": "tool", "tool_call_id": "call_1", "content": "ok"}]}
    return [
        streamed(CHAT, {"messages": []}, {"choices": [{"delta": {"tool_calls": [call]}}]}, "[DONE]"),
        streamed(CHAT, later, {"choices": []}, "[DONE]"),
    ]


def response_log() -> list[Exchange]:
    item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "run", "arguments": "{}"}
    later = {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "ok"}]}
    end = {"type": "response.completed", "response": {}}
    return [
        streamed(RESPONSES, {"input": []}, {"type": "response.output_item.added", "item": item}, end),
        streamed(RESPONSES, later, end),
    ]


LOGS = {"messages": message_log(), "chat": chat_log(), "responses": response_log()}


@pytest.mark.parametrize("name", LOGS)
def test_a_call_whose_result_came_back_is_good(name: str) -> None:
    first, second = LOGS[name]
    assert len(calls(first)) == 1
    assert calls(first) == results(second)
    assert problems([first, second]) == []


@pytest.mark.parametrize("name", LOGS)
def test_a_call_whose_result_never_came_back_is_named(name: str) -> None:
    first, second = LOGS[name]
    assert "never came back" in problems([first, replace(second, body={})])[0]


@pytest.mark.parametrize("name", LOGS)
def test_a_stream_without_its_last_event_is_named(name: str) -> None:
    first, second = LOGS[name]
    cut = replace(second, answer=second.answer.rpartition(b": waiting")[0])
    assert "the stream ended with" in problems([first, cut])[0]


def test_refusals_give_ups_and_silence_are_named() -> None:
    first, second = message_log()
    assert "answered with 400: no" in problems([first, replace(second, status=400, answer=b"no")])[0]
    assert "answered with nothing" in problems([first, replace(second, status=0)])[0]
    assert "gave up after 120 s" in problems([first, replace(second, was_left=True, took_s=120.0)])[0]
    assert problems([Exchange("GET", "/v1/models", {}, None, 404)]) == ["The agent sent no request to a model."]


def test_an_error_in_a_stream_is_named() -> None:
    error = {"type": "error", "error": {"message": "lost"}}
    found = problems([streamed(MESSAGES, {}, error, {"type": "message_stop"})])
    assert found == ["Request 0 (POST /v1/messages): an error is in the stream."]


@pytest.mark.parametrize(
    ("path", "limit", "tool", "choice"),
    [
        (MESSAGES, "max_tokens", {"name": "Bash"}, {"type": "tool", "name": "Bash"}),
        (RESPONSES, "max_output_tokens", {"name": "exec_command"}, {"type": "function", "name": "exec_command"}),
        (
            *(CHAT, "max_tokens", {"type": "function", "function": {"name": "run_shell_command"}}),
            {"type": "function", "function": {"name": "run_shell_command"}},
        ),
    ],
)
def test_answers_are_short_and_the_first_with_tools_runs_a_command(
    path: str, limit: str, tool: dict[str, Any], choice: dict[str, Any]
) -> None:
    change = ShortAnswers()
    short = {"temperature": 0, limit: MAX_TOKENS}
    asked = {"tools": [{"name": "other"}, tool], "tool_choice": "auto"}
    assert change(path, {limit: 32_000}) == short
    assert change(path, asked) == {**asked, **short, "tool_choice": choice}
    for _ in range(MAX_TURNS - 1):
        assert change(path, asked) == {**asked, **short}
    forbidden = change(path, asked)["tool_choice"]
    assert forbidden in ("none", {"type": "none"}), "the agent must end, whatever the model does"
    assert change("/v1/models", {}) == {}


def test_codex_gets_no_home_below_tmp_where_it_would_run_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert place_for_homes(tmp_path / "clone" / ".agents" / "logs") == tmp_path / "clone" / ".agents"
    below = tmp_path / "tmp" / "clone" / ".agents" / "logs"
    assert place_for_homes(below) == tmp_path / "home" / ".cache" / "millrace" / "agents"
