"""The stock `openai` client, unchanged, against a front on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import eventually

pytestmark = pytest.mark.live

TEXT = 'Grüße, "world" 🌍\nbye'
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT)) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_completion_tokens=50)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer._request_id


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 20 + len(TEXT.encode()) + 1


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    """The client's own accumulator fails on malformed chunks."""
    with client.chat.completions.stream(model=MODEL, messages=HI, logprobs=True, n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [TEXT, TEXT]
    assert final.choices[1].logprobs is not None


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=50, logprobs=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["a" + TEXT, "b" + TEXT]
    chunks = list(client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "millrace"


def test_raw_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, extra_headers={"X-Request-Id": "abc"}
    )
    assert raw.headers["x-request-id"] == "abc"
    assert raw.parse().choices[0].message.content == TEXT


def test_extensions_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, extra_body={"top_k": 3, "min_p": 0.1, "return_token_ids": True}
    )
    assert answer.choices[0].message.content == TEXT


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "gpt-4o"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"tool_choice": "required"}, openai.BadRequestError),
        ({"max_tokens": 10**9}, openai.BadRequestError),
    ],
)
def test_errors_are_the_clients_own(client: openai.OpenAI, fields: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param in fields


def test_an_error_inside_a_stream_is_raised() -> None:
    with (
        running_front(endless, step_s=0.01) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        next(iter(stream))
        front.call(lambda: front.engine.die("The engine is gone."))
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert "gone" in str(caught.value)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model=MODEL, messages=HI)


def test_overload_is_a_rate_limit() -> None:
    with (
        running_front(endless, max_open=1) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.chat.completions.create(model=MODEL, messages=HI, n=2)


def test_closing_a_stream_aborts(front: Front) -> None:
    with (
        running_front(endless, step_s=0.01) as other,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key="any") as client,
    ):
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        next(iter(stream))
        stream.close()
        eventually(lambda: not other.engine.rows)
        assert [reason for _, reason in other.engine.aborted] == ["abort"]


def test_async_client(front: Front) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="any") as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(model=MODEL, messages=HI)
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = await asyncio.gather(*[job() for job in [whole, streamed] * 16])
        assert set(texts) == {TEXT}

    asyncio.run(main())


class Person(pydantic.BaseModel):
    name: str
    age: int | None
    friends: list[str]


def test_an_answer_is_parsed_into_a_model() -> None:
    """The client's `parse` sends the model's JSON schema and reads the answer with it."""
    with (
        running_front(saying('{"name": "Ann", "age": null, "friends": ["Bo"]}')) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client,
    ):
        answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)
        assert answer.choices[0].message.parsed == Person(name="Ann", age=None, friends=["Bo"])
        grammar = running.engine.received[-1].params.grammar
        assert grammar is not None
        assert list(json.loads(grammar.source)["properties"]) == ["name", "age", "friends"]
        with client.chat.completions.stream(model=MODEL, messages=HI, response_format=Person) as stream:
            parsed = stream.get_final_completion().choices[0].message.parsed
        assert parsed == Person(name="Ann", age=None, friends=["Bo"])
