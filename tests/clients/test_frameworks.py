"""Agent frameworks against a running server. Run by `make test-clients`, with packages of their own.

`MILLRACE_URL` names the server; the model is whatever it serves. The default model is small, so calls are forced.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from typing import Any

import pydantic
import pytest

URL = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
ASKED = "What is the weather in Paris?"


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(ge=1, le=9)


@pytest.fixture(scope="session")
def model() -> str:
    with urllib.request.urlopen(f"{URL}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


def test_instructor(model: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="any"), mode=mode)
        found = client.chat.completions.create(
            model=model, response_model=Weather, messages=[{"role": "user", "content": ASKED}], temperature=0
        )
        assert isinstance(found, Weather)


def test_langchain(model: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    llm = langchain.ChatOpenAI(base_url=f"{URL}/v1", api_key="any", model=model, temperature=0, timeout=60)
    for method in ("function_calling", "json_schema"):
        assert isinstance(llm.with_structured_output(Weather, method=method).invoke(ASKED), Weather)
    bound = llm.bind_tools([Weather], tool_choice="Weather")
    [call] = bound.invoke(ASKED).tool_calls
    assert call["name"] == "Weather"
    gathered: Any = None
    for chunk in bound.stream(ASKED):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"] == call["args"]


def test_pydantic_ai(model: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    provider = providers.OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
    llm = models.OpenAIChatModel(model, provider=provider)
    agent = pydantic_ai.Agent(llm, output_type=Weather, model_settings={"temperature": 0})
    assert isinstance(agent.run_sync(ASKED).output, Weather)


def test_openai_agents(model: str) -> None:
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        called.append(city)
        return "sunny"

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any")  # Belongs to one event loop.
        agent = agents.Agent(
            name="a",
            model=kind(model=model, openai_client=client),
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=agents.ModelSettings(
                tool_choice="get_weather", temperature=0, max_tokens=120, parallel_tool_calls=False
            ),
        )
        before = len(called)
        result = asyncio.run(agents.Runner.run(agent, ASKED))
        assert len(called) == before + 1
        assert result.final_output == "sunny"


def test_smolagents(model: str) -> None:
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: the city
        """
        return "sunny"

    llm = smolagents.OpenAIServerModel(model_id=model, api_base=f"{URL}/v1", api_key="any", temperature=0)
    message = smolagents.ChatMessage(role="user", content=[{"type": "text", "text": ASKED}])
    answer = llm.generate([message], tools_to_call_from=[get_weather], max_tokens=200)
    assert answer.tool_calls[0].function.name == "get_weather"


def test_llama_index(model: str) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    tools = pytest.importorskip("llama_index.core.tools")

    def get_weather(city: str) -> str:
        """Weather of a city."""
        return "sunny"

    llm = openai_like.OpenAILike(
        model=model,
        api_base=f"{URL}/v1",
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=120,
    )
    tool = tools.FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=ASKED, tool_required=True, allow_parallel_tool_calls=False)
    assert llm.get_tool_calls_from_response(answer)[0].tool_name == "get_weather"
    assert isinstance(llm.as_structured_llm(Weather).complete(ASKED).raw, Weather)


def test_litellm(model: str) -> None:
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}
    named = {"type": "function", "function": {"name": "Weather"}}
    messages = [{"role": "user", "content": ASKED}]
    for prefix, base in (("openai/", f"{URL}/v1"), ("anthropic/", URL)):
        answer = litellm.completion(
            model=prefix + model,
            api_base=base,
            api_key="any",
            messages=messages,
            tools=[tool],
            tool_choice=named,
            max_tokens=100,
        )
        [call] = answer.choices[0].message.tool_calls
        Weather.model_validate_json(call.function.arguments)
