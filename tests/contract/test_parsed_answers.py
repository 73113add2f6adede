"""Stock clients that send a schema and read the answer into a model: responses, Anthropic's messages and Ollama."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import ollama
import openai
import pydantic
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying

pytestmark = pytest.mark.live


class Person(pydantic.BaseModel):
    name: str
    age: int


ANN = Person(name="Ann", age=3)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying('{"name": "Ann", "age": 3}')) as running:
        yield running


def check_sent(front: Front) -> None:
    grammar = front.engine.received[-1].params.grammar
    assert grammar is not None
    assert list(json.loads(grammar.source)["properties"]) == ["name", "age"]


def test_openai_responses(front: Front) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        assert client.responses.parse(model=MODEL, input="hi", text_format=Person).output_parsed == ANN
        check_sent(front)
        with client.responses.stream(model=MODEL, input="hi", text_format=Person) as stream:
            assert stream.get_final_response().output_parsed == ANN


def test_anthropic(front: Front) -> None:
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as client:
        message = client.messages.parse(
            model=MODEL, max_tokens=60, messages=[{"role": "user", "content": "hi"}], output_format=Person
        )
    assert message.parsed_output == ANN
    check_sent(front)


def test_ollama(front: Front) -> None:
    answer = ollama.Client(front.url).chat(
        MODEL, [{"role": "user", "content": "hi"}], format=Person.model_json_schema()
    )
    assert Person.model_validate_json(answer.message.content or "") == ANN
    check_sent(front)


def test_vllm_fields(front: Front) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        for extra in (
            {"structured_outputs": {"json": Person.model_json_schema()}},
            {"guided_json": Person.model_json_schema()},
        ):
            client.completions.create(model=MODEL, prompt="hi", max_tokens=60, extra_body=extra)
            check_sent(front)
