"""Agent frameworks against a running server. Run by `make test-clients`, with packages of their own.

`MILLRACE_URL` names the server; the model is whatever it serves. The default model is small, so calls are forced.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pydantic
import pytest

URL = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
ASKED = "What is the weather in Paris?"


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(ge=1, le=9)


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


@pytest.mark.parametrize("package", ["langchain_anthropic.ChatAnthropic", "langchain_ollama.ChatOllama"])
def test_langchain_in_other_dialects(model: str, package: str) -> None:
    module, _, name = package.partition(".")
    kind = getattr(pytest.importorskip(module), name)
    if name == "ChatAnthropic":
        llm = kind(model_name=model, base_url=URL, api_key="any", temperature=0, max_tokens=150, timeout=60, stop=None)
        [call] = llm.bind_tools([Weather], tool_choice="Weather").invoke(ASKED).tool_calls
        assert call["name"] == "Weather"
    else:
        llm = kind(model=model, base_url=URL, temperature=0, num_predict=150)
    method = "json_schema" if name == "ChatOllama" else "function_calling"
    assert isinstance(llm.with_structured_output(Weather, method=method).invoke(ASKED), Weather)


def test_langchain_tool_loop(model: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    for responses in (False, True):
        llm = langchain.ChatOpenAI(
            base_url=f"{URL}/v1", api_key="any", model=model, temperature=0, max_tokens=150, use_responses_api=responses
        )
        messages: list[Any] = [HumanMessage(ASKED)]
        for _ in range(2):
            answer = llm.bind_tools([Weather], tool_choice="Weather").invoke(messages)
            messages += [answer, *(ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls)]
            assert len(answer.tool_calls) == 1
        assert llm.invoke(messages).text
        pieces = list(llm.with_structured_output(Weather, method="json_schema").stream(ASKED))
        assert isinstance(pieces[-1], Weather)


def test_pydantic_ai(model: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    provider = providers.OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
    llm = models.OpenAIChatModel(model, provider=provider)
    agent = pydantic_ai.Agent(llm, output_type=Weather, model_settings={"temperature": 0})
    assert isinstance(agent.run_sync(ASKED).output, Weather)

    async def streamed() -> Any:
        async with agent.run_stream(ASKED) as result:
            pieces = [piece async for piece in result.stream_output()]
            assert pieces
            return await result.get_output()

    assert isinstance(asyncio.run(streamed()), Weather)
    native = pydantic_ai.Agent(llm, output_type=pydantic_ai.NativeOutput(Weather), model_settings={"temperature": 0})
    assert isinstance(native.run_sync(ASKED).output, Weather)


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
    *_, last = llm.stream_chat_with_tools([tool], user_msg=ASKED, tool_required=True, allow_parallel_tool_calls=False)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs.keys() == {"city"}
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
        chunks = list(
            litellm.completion(
                model=prefix + model,
                api_base=base,
                api_key="any",
                messages=messages,
                tools=[tool],
                tool_choice=named,
                max_tokens=100,
                stream=True,
            )
        )
        whole = litellm.stream_chunk_builder(chunks)
        Weather.model_validate_json(whole.choices[0].message.tool_calls[0].function.arguments)


def test_vercel_ai_sdk(model: str) -> None:
    """`MILLRACE_NODE` names a folder in which the packages are installed."""
    node, folder = shutil.which("node"), os.environ.get("MILLRACE_NODE", "")
    if node is None or not Path(folder, "node_modules", "ai").is_dir():
        pytest.skip("Node or the packages are not installed")
    script = shutil.copy(Path(__file__).with_name("vercel.mjs"), folder)  # Node looks for packages beside the script.
    ran = subprocess.run([node, script, URL, model], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
