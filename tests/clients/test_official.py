"""The official packages as agents use them: tool loops, parallel and streamed calls, structured output in streams."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import pydantic
import pytest

URL = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
ASKED = "What is the weather in Paris and in Rome?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
MAX_TOKENS = 160


class Weather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(ge=1, le=9)


class Place(pydantic.BaseModel):
    """Without limits on numbers: the package of Anthropic takes those out of the schema."""

    city: Literal["Paris", "Rome"]
    days: int


def test_openai_chat_tool_loop(model: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(2):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=MAX_TOKENS, temperature=0
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason in ("tool_calls", "length")
        messages.append(message)
        for call in message.tool_calls:
            if answer.choices[0].finish_reason == "tool_calls":
                assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    last = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=9)
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


def test_openai_chat_streams(model: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    asked: list[Any] = [{"role": "user", "content": ASKED}]
    tool = openai.pydantic_function_tool(Weather)
    with client.chat.completions.stream(
        model=model, messages=asked, tools=[tool], tool_choice="required", temperature=0, parallel_tool_calls=False
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert [event.arguments for event in done] == [call.function.arguments]
    with client.chat.completions.stream(model=model, messages=asked, response_format=Weather, temperature=0) as stream:
        seen = [event for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)
    assert "".join(event.delta for event in seen) == final.choices[0].message.content


def test_openai_responses(model: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    choice = {"type": "function", "name": "get_weather"}
    first = client.responses.create(model=model, input=ASKED, tools=[tool], tool_choice=choice, temperature=0)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(
        model=model,
        previous_response_id=first.id,
        input=[result],
        tools=[tool],
        tool_choice="none",
        max_output_tokens=16,
    )
    assert again.output_text
    parsed = client.responses.parse(model=model, input=ASKED, text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(model=model, input=ASKED, text_format=Weather, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_parsed == Weather.model_validate_json(text)
    with client.responses.stream(model=model, input=ASKED, tools=[tool], tool_choice=choice, temperature=0) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [call] = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert "".join(parts) == call.arguments
    assert len(parts) > 1


def test_anthropic_tool_loop(model: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=URL, api_key="any")
    tools = [{"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    choice = {"type": "tool", "name": "get_weather"}
    first = client.messages.create(
        model=model, max_tokens=MAX_TOKENS, messages=messages, tools=tools, tool_choice=choice
    )
    assert first.stop_reason == "tool_use"
    [used] = [block for block in first.content if block.type == "tool_use"]
    assert used.id.startswith("toolu_")
    assert used.input["city"] in ("Paris", "Rome")
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]},
    ]
    with client.messages.stream(
        model=model, max_tokens=MAX_TOKENS, messages=messages, tools=tools, tool_choice=choice
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == final.content[-1].input
    last = client.messages.create(
        model=model, max_tokens=9, messages=messages, tools=tools, tool_choice={"type": "none"}
    )
    assert last.content[0].type == "text"


def test_anthropic_structured_output(model: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=URL, api_key="any")
    asked: list[Any] = [{"role": "user", "content": ASKED}]
    answer = client.messages.parse(model=model, max_tokens=MAX_TOKENS, messages=asked, output_format=Place)
    assert isinstance(answer.parsed_output, Place)


def test_ollama(model: str) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(URL)

    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: the city
        """
        return "sunny"

    messages: list[Any] = [{"role": "user", "content": ASKED}]
    answer = client.chat(model, messages, format=Weather.model_json_schema(), options={"num_predict": MAX_TOKENS})
    Weather.model_validate_json(answer.message.content)
    stream = client.chat(model, messages, format=Weather.model_json_schema(), stream=True)
    Weather.model_validate_json("".join(part.message.content or "" for part in stream))
    messages += [
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    said = client.chat(model, messages, tools=[get_weather], options={"num_predict": 16})
    assert said.message.content or said.message.tool_calls
