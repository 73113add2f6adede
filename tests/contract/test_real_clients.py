"""Stock clients, streamed and not, against the real server with the default model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from contract.real_server import RealServer
from serve.wire import CHAT, eventually, post

pytestmark = pytest.mark.live

MODEL = "smollm2-135m-instruct"
QUESTION = "Name the capital of France."
TURN: list[Any] = [{"role": "user", "content": QUESTION}]
TOKENS = 16


@pytest.fixture(scope="module")
def expected(server: RealServer) -> str:
    """The greedy answer over plain HTTP; every client must get the same."""
    body = {"model": MODEL, "messages": TURN, "temperature": 0, "max_tokens": TOKENS}
    text: str = post(server.port, CHAT, body).json["choices"][0]["message"]["content"]
    assert "Paris" in text
    return text


def test_openai(server: RealServer, expected: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        fields: Any = {"model": MODEL, "temperature": 0}
        answer = client.chat.completions.create(messages=TURN, max_tokens=TOKENS, **fields)
        assert answer.choices[0].message.content == expected
        chunks = client.chat.completions.create(messages=TURN, max_tokens=TOKENS, stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        response = client.responses.create(input=QUESTION, max_output_tokens=TOKENS, **fields)
        assert response.output_text == expected
        events = client.responses.create(input=QUESTION, max_output_tokens=TOKENS, stream=True, **fields)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
        second = client.responses.create(
            input="And of Italy?", previous_response_id=response.id, max_output_tokens=TOKENS, **fields
        )
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens > 0


def test_openai_async(server: RealServer, expected: str) -> None:
    import openai

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=60) as client:

            async def ask() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=TURN, max_tokens=TOKENS, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[ask() for _ in range(4)])

    assert set(asyncio.run(main())) == {expected}


def test_anthropic(server: RealServer, expected: str) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60) as client:
        fields: Any = {"model": MODEL, "messages": TURN, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
        message = client.messages.create(**fields)
        assert message.content[0].text == expected  # type: ignore[union-attr]
        with client.messages.stream(**fields) as stream:
            assert "".join(stream.text_stream) == expected
        counted = client.messages.count_tokens(model=MODEL, messages=TURN)
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_ollama(server: RealServer, expected: str) -> None:
    import ollama

    client = ollama.Client(server.url, timeout=60)
    options = {"temperature": 0, "num_predict": TOKENS}
    assert client.chat(MODEL, TURN, options=options).message.content == expected
    parts = client.chat(MODEL, TURN, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == expected
    assert client.generate(MODEL, QUESTION, options=options).response == expected
    assert "".join(part.response for part in client.generate(MODEL, QUESTION, options=options, stream=True)) == expected
    assert [model.model for model in client.list().models] == [MODEL]
    assert client.show(MODEL).modelinfo


def test_litellm(server: RealServer, expected: str) -> None:
    import litellm

    fields: Any = {"messages": TURN, "max_tokens": TOKENS, "temperature": 0, "timeout": 60}
    own: Any = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "any"}
    assert litellm.completion(**own, **fields).choices[0].message.content == expected
    chunks = litellm.completion(**own, **fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The sea is",
        max_tokens=4,
        **{k: own[k] for k in own if k != "model"},
    )
    assert text.choices[0].text
    other: Any = {"model": f"anthropic/{MODEL}", "api_base": server.url, "api_key": "any"}
    assert litellm.completion(**other, **fields).choices[0].message.content == expected
    third: Any = {"model": f"ollama_chat/{MODEL}", "api_base": server.url}
    assert litellm.completion(**third, **fields).choices[0].message.content == expected


def test_langchain_openai(server: RealServer, expected: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import SecretStr

    own: Any = {"base_url": f"{server.url}/v1", "api_key": SecretStr("any"), "temperature": 0, "timeout": 60}
    chat = ChatOpenAI(model=MODEL, max_tokens=TOKENS, **own)
    assert chat.invoke(QUESTION).content == expected
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == expected
    assert chat.batch([QUESTION, QUESTION])[1].content == expected
    responses = ChatOpenAI(model=MODEL, max_tokens=TOKENS, use_responses_api=True, **own)
    assert responses.invoke(QUESTION).text == expected
    assert OpenAI(model=MODEL, max_tokens=4, **own).invoke("The sea is")


def test_a_batch(server: RealServer, expected: str) -> None:
    import openai

    body = {"model": MODEL, "messages": TURN, "temperature": 0, "max_tokens": TOKENS}
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(3)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
        batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["response"]["body"]["choices"][0]["message"]["content"] for line in results] == [expected] * 3


# ── tools ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]


def test_openai_tools(server: RealServer) -> None:
    import openai
    import pydantic

    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=20)

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        fields: Any = {"model": MODEL, "temperature": 0, "parallel_tool_calls": False}
        tool: Any = openai.pydantic_function_tool(Weather)
        parsed = client.chat.completions.parse(messages=ASKED, tools=[tool], tool_choice="required", **fields)
        [call] = parsed.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        assert parsed.choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(messages=ASKED, tools=[tool], tool_choice="required", **fields) as stream:
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history: Any = [*ASKED, parsed.choices[0].message, result]
        again = client.chat.completions.create(messages=history, tools=[tool], max_tokens=8, **fields)
        assert again.choices[0].finish_reason in ("stop", "length")
        function: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
        chosen: Any = {"type": "function", "name": "get_weather"}
        response = client.responses.create(input=ASKED, tools=[function], tool_choice=chosen, **fields)
        [item] = response.output
        assert item.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}]
        after = client.responses.create(
            input=output, previous_response_id=response.id, tools=[function], max_output_tokens=8, **fields
        )
        assert after.status in ("completed", "incomplete")
        with client.responses.stream(input=ASKED, tools=[function], tool_choice="required", **fields) as events:
            kinds = {event.type for event in events}
            [final] = events.get_final_response().output
        assert "response.function_call_arguments.delta" in kinds
        assert final.type == "function_call"
        assert final.arguments == item.arguments


def test_anthropic_tools(server: RealServer) -> None:
    import anthropic

    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    chosen: Any = {"type": "tool", "name": "get_weather"}
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60) as client:
        fields: Any = {"model": MODEL, "tools": tools}
        answer = client.messages.create(max_tokens=100, messages=ASKED, tool_choice=chosen, **fields)
        [used] = answer.content
        assert used.type == "tool_use"
        assert answer.stop_reason == "tool_use"
        assert set(used.input) == {"city", "days"}
        one: Any = {"type": "any", "disable_parallel_tool_use": True}
        with client.messages.stream(max_tokens=100, messages=ASKED, tool_choice=one, **fields) as stream:
            [streamed] = stream.get_final_message().content
        assert streamed.type == "tool_use"
        assert set(streamed.input) == {"city", "days"}
        results: Any = [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]
        history: Any = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        again = client.messages.create(max_tokens=8, messages=history, **fields)
        assert again.stop_reason in ("end_turn", "max_tokens")


def test_ollama_tools(server: RealServer) -> None:
    import ollama

    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        return f"sunny in {city} for {days} days"

    client = ollama.Client(server.url, timeout=60)
    fields: Any = {"model": MODEL, "options": {"temperature": 0, "num_predict": 16}}
    answer = client.chat(messages=ASKED, tools=[get_weather], **fields)
    assert answer.message.content is not None or answer.message.tool_calls
    call: Any = {"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}
    said: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    again = client.chat(messages=[*ASKED, said, result], tools=[get_weather], **fields)
    assert again.done
