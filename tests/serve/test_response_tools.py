"""Tools of /v1/responses beyond plain functions: namespaces, tools that this server does not run; and its labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.test_tool_calls import TOOL_TEMPLATE, prompt_of
from serve.wire import Reply, get, post

from millrace.observe.audit import AuditLog
from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live

RESPONSES = "/v1/responses"
WARNING = "x-millrace-warning"
SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
FUNCTION = {"type": "function", "name": "find", "description": "Find one.", "parameters": SCHEMA}
CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [FUNCTION, {"type": "custom", "name": "note"}],
}
WEB = {"type": "web_search", "external_web_access": True}
ARGUMENTS = '{"id": "7"}'
CALL = f'<tool_call>\n{{"name": "crm__find", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(CALL), template=ChatTemplate({"default": TOOL_TEMPLATE}, {})) as running:
        yield running


def ask(front: Front, **fields: Any) -> Reply:
    return post(front.port, RESPONSES, {"model": MODEL, "input": "hi", **fields})


def test_a_function_in_a_namespace_is_called_by_both_names(front: Front) -> None:
    reply = ask(front, tools=[CRM])
    assert reply.status == 200, reply.body
    [call] = reply.json["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "find")
    assert json.loads(call["arguments"]) == {"id": "7"}
    assert '"crm__find"' in prompt_of(front)
    assert "Customers.\\nFind one." in prompt_of(front)
    assert reply.json["tools"] == [{**CRM, "tools": [{**FUNCTION, "strict": None, "defer_loading": None}]}]
    assert reply.headers[WARNING] == "tools that this server does not run were left out: custom"


def test_a_streamed_call_and_its_result_with_the_stock_client(front: Front) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0)
    tools: Any = [CRM]
    with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(item.name, item.namespace) for item in added if item.type == "function_call"] == [("find", "crm")]
    assert [event.name for event in done] == ["find"]
    call = final.output[0]
    assert call.type == "function_call"
    result: Any = {
        "type": "function_call_output", "call_id": call.call_id, "output": "Ada", "name": "find", "namespace": "crm"
    }  # fmt: skip
    past: Any = [{"role": "user", "content": "hi"}, call.to_dict(), result]
    client.responses.create(model=MODEL, input=past, tools=tools)
    assert f"<tool_call>{call.call_id} crm__find" in prompt_of(front)
    client.responses.create(model=MODEL, input=[result], previous_response_id=final.id, tools=tools)
    assert f"<tool_call>{call.call_id} crm__find" in prompt_of(front)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "find"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "find"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}, WEB]},
        "required",
    ],
)
def test_a_choice_of_tools_reaches_into_namespaces(front: Front, choice: Any) -> None:
    assert ask(front, tools=[CRM, WEB], tool_choice=choice).status == 200
    grammar = front.engine.received[-1].params.grammar
    assert grammar is not None
    assert "crm__find" in grammar.source


def test_a_name_that_ends_as_names_are_joined_is_not_joined_twice(front: Front) -> None:
    ask(front, tools=[{**CRM, "name": "mcp__crm__"}])
    assert '"mcp__crm__find"' in prompt_of(front)


KINDS = ["web_search", "web_search_preview", "file_search", "local_shell", "shell", "apply_patch", "code_interpreter",
         "image_generation", "mcp", "computer", "computer_use_preview", "tool_search", "custom",
         "programmatic_tool_calling"]  # fmt: skip


def test_tools_that_are_not_run_are_left_out_with_a_warning(front: Front) -> None:
    sent = [FUNCTION, *({"type": kind, "name": "x", "anything": [1]} for kind in KINDS)]
    reply = ask(front, tools=sent)
    assert reply.status == 200, reply.body
    assert reply.headers[WARNING] == f"tools that this server does not run were left out: {', '.join(KINDS)}"
    assert [tool["name"] for tool in reply.json["tools"]] == ["find"]
    assert ask(front, tools=sent, stream=True).headers[WARNING] == reply.headers[WARNING]
    assert ask(front, tools=sent, background=True).headers[WARNING] == reply.headers[WARNING]
    assert ask(front, tools=sent, background=True, stream=True).headers[WARNING] == reply.headers[WARNING]
    assert WARNING not in ask(front, tools=[FUNCTION]).headers
    only_web = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert ask(front, tools=sent, tool_choice=only_web).status == 200
    assert "find" not in prompt_of(front)


@pytest.mark.parametrize("choice", ["required", {"type": "allowed_tools", "mode": "required", "tools": [WEB]}])
def test_a_required_tool_that_is_not_run_is_refused_by_name(front: Front, choice: Any) -> None:
    reply = ask(front, tools=[WEB], tool_choice=choice)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "does not run web_search" in reply.error["message"]


def test_client_metadata_is_a_label(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    labels = {"x-codex-installation-id": "a-b", "turn": {"n": 1}, "long": "y" * 2000}
    with running_front(saying("ok")) as front:
        front.state.audit = AuditLog(str(log))
        reply = ask(front, client_metadata=labels)
        assert (reply.status, reply.json["client_metadata"]) == (200, labels)
        assert get(front.port, f"{RESPONSES}/{reply.json['id']}").json["client_metadata"] == labels
        assert "client_metadata" not in ask(front).json
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["labels"] == {"x-codex-installation-id": "a-b", "turn": '{"n":1}', "long": "y" * 512}
    assert "labels" not in lines[2]
