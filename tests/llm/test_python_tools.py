"""Python functions as tools: their descriptions, parsed calls, and the loop that runs them."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from millrace.errors import BadRequest
from millrace.llm import LLM, AsyncLLM, ToolCall
from millrace.llm.tools import Toolbox, describe, result_message

FIXED: dict[str, Any] = {"max_tokens": 200, "seed": 3}


def add(a: Literal[1, 2], b: Literal[3, 4] = 3) -> int:
    """Add two numbers."""
    return a + b


def only(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_function_is_described_by_its_signature() -> None:
    def find(
        place: Annotated[str, msgspec.Meta(description="A city.")], days: int = 3, exact: bool | None = None
    ) -> None:
        """Weather of some days."""

    assert describe(find).spec() == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Weather of some days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A city."},
                    "days": {"type": "integer", "default": 3},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }


class Where(pydantic.BaseModel):
    city: str


class Who(msgspec.Struct):
    name: str


def test_arguments_get_the_types_of_the_annotations() -> None:
    def visit(where: Where, days: int = 1) -> str:
        return f"{where.city} {days}"

    def meet(who: Who, also: list[Who] = []) -> str:  # noqa: B006
        return " ".join(one.name for one in (who, *also))

    box = Toolbox([visit, meet])
    assert box.run(ToolCall("1", "visit", {"where": {"city": "Rome"}})) == "Rome 1"
    assert box.run(ToolCall("1", "meet", {"who": {"name": "Ann"}, "also": [{"name": "Bo"}]})) == "Ann Bo"
    assert box.run(ToolCall("1", "meet", {"who": 5})).startswith("Error: ValidationError")
    assert box.run(ToolCall("1", "visit", {"where": {"city": "Rome"}, "dasy": 2})).startswith("Error: ValidationError")
    assert box.run(ToolCall("1", "meet", "{")).startswith("Error: TypeError")
    json.dumps(box.specs)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (5, "tools is not a list"),
        ([5], "A tool is 5; give a function"),
        ([lambda *args: 0], "takes named arguments only"),
        ([print], "cannot be described|named arguments only"),
        ([add, add], "two functions named 'add'"),
        ([{"type": "function", "function": {"nmae": "f"}}], "nmae"),
    ],
)
def test_what_is_no_tool_is_refused(tiny: LLM, tools: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        tiny.chat("x", tools=tools, max_tokens=1)


def test_calls_are_parsed(tiny: LLM) -> None:
    found = tiny.chat("What is 1 + 3?", tools=[add], tool_choice=only("add"), **FIXED)
    (call,) = found.tool_calls
    assert call.name == "add"
    assert isinstance(call.arguments, dict)
    assert call.arguments["a"] in (1, 2)
    assert call.is_complete
    assert found.finish_reason == "tool_calls"
    assert found.text == ""
    assert found.parsed is None
    assert found.messages[-1]["tool_calls"][0]["id"] == call.id
    streamed = list(tiny.stream_chat("What is 1 + 3?", tools=[add], tool_choice=only("add"), **FIXED))
    assert streamed[-1].choice is not None
    assert [one.arguments for one in streamed[-1].choice.tool_calls] == [call.arguments]
    assert "".join(part.text for part in streamed) == ""


def test_a_loop_runs_the_calls_and_gives_the_results_back(tiny: LLM) -> None:
    found = tiny.chat("What is 1 + 3?", tools=[add], tool_choice=only("add"), tool_rounds=1, **FIXED)
    roles = [message["role"] for message in found.messages]
    assert roles[:3] == ["user", "assistant", "tool"]
    called, result = found.messages[1]["tool_calls"][0], found.messages[2]
    arguments = json.loads(called["function"]["arguments"])
    assert result == {
        "role": "tool",
        "tool_call_id": called["id"],
        "name": "add",
        "content": str(arguments["a"] + arguments.get("b", 3)),
    }
    prompt = tiny.tokenizer.decode(found.prompt_token_ids)
    assert f"<tool_response>\n{result['content']}\n</tool_response>" in prompt


def test_without_rounds_and_for_tools_without_a_function_the_caller_runs_the_calls(tiny: LLM) -> None:
    spec = describe(add).spec()
    found = tiny.chat("x", tools=[spec], tool_choice="required", tool_rounds=3, **FIXED)
    assert found.tool_calls
    assert [message["role"] for message in found.messages] == ["user", "assistant"]


def test_results_are_text_or_json() -> None:
    call = ToolCall("1", "f", {})
    assert result_message(call, "plain")["content"] == "plain"
    assert result_message(call, {"a": [1, None]})["content"] == '{"a":[1,null]}'
    assert result_message(call, Who("Ann"))["content"] == '{"name":"Ann"}'

    async def later() -> int:
        return 1

    with pytest.raises(BadRequest, match="is an async function; use AsyncLLM"):
        result_message(call, later())


def test_async_functions_run_on_the_callers_loop(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[object] = []

    async def add_later(a: Literal[1, 2]) -> int:
        """Add one, later."""
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return a + 1

    async def fail(a: Literal[1, 2]) -> int:
        raise ValueError("no")

    async def use() -> None:
        twin = AsyncLLM()
        monkeypatch.setattr(twin, "_opened", tiny)  # The model that is loaded already.
        found = await twin.chat("x", tools=[add_later], tool_choice=only("add_later"), tool_rounds=1, **FIXED)
        assert found.messages[2]["content"] in ("2", "3")
        assert loops == [asyncio.get_running_loop()]
        failed = await twin.chat("x", tools=[fail], tool_choice=only("fail"), tool_rounds=1, **FIXED)
        assert failed.messages[2]["content"] == "Error: ValueError: no"

    asyncio.run(use())
