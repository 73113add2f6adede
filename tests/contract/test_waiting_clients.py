"""The stock clients while a request waits: they skip pings, and raise errors that come after the HTTP head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anthropic
import ollama
import openai
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import eventually

from millrace.serve.generate import heartbeat
from millrace.serve.http.event_stream import EventStream

pytestmark = pytest.mark.live

TEXT = "Hello there"
HI: list[Any] = [{"role": "user", "content": "hi"}]
FAILURE = "The step that computed this request failed."


@pytest.fixture
def num_pings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each ping that was sent."""
    sent: list[int] = []
    keep_alive = EventStream.keep_alive

    def counted(stream: EventStream, ping: bytes, *, after_preamble: bool) -> None:
        keep_alive(stream, ping, after_preamble=after_preamble)
        sent.append(len(ping))

    monkeypatch.setattr(EventStream, "keep_alive", counted)
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.02)
    monkeypatch.setattr(heartbeat, "PING_EVERY_S", 0.02)
    return sent


@pytest.fixture
def front() -> Iterator[Front]:
    with running_front(saying(TEXT)) as running:
        running.call(running.engine.pause)
        yield running


def chat(front: Front) -> Iterator[str]:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0)
    for chunk in client.chat.completions.create(model=MODEL, messages=HI, stream=True):
        yield from (choice.delta.content or "" for choice in chunk.choices)


def chat_helper(front: Front) -> Iterator[str]:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0)
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        for event in stream:
            if event.type == "content.delta":
                yield event.delta


def completions(front: Front) -> Iterator[str]:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0)
    for chunk in client.completions.create(model=MODEL, prompt="hi", max_tokens=50, stream=True):
        yield chunk.choices[0].text


def responses(front: Front) -> Iterator[str]:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0)
    for event in client.responses.create(model=MODEL, input="hi", stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta


def messages(front: Front) -> Iterator[str]:
    client = anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0)
    with client.messages.stream(model=MODEL, max_tokens=50, messages=HI) as stream:
        yield from stream.text_stream


def ollama_chat(front: Front) -> Iterator[str]:
    for part in ollama.Client(host=front.url).chat(MODEL, messages=HI, stream=True):
        yield part.message.content or ""


def ollama_generate(front: Front) -> Iterator[str]:
    for part in ollama.Client(host=front.url).generate(MODEL, prompt="hi", stream=True):
        yield part.response


@contextmanager
def running_beside(act: Callable[[], None]) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        yield
        done.result(60)


CLIENTS: list[Callable[[Front], Iterator[str]]] = [
    chat,
    chat_helper,
    completions,
    responses,
    messages,
    ollama_chat,
    ollama_generate,
]


@pytest.mark.parametrize("ask", CLIENTS)
def test_pings_are_skipped(front: Front, num_pings: list[int], ask: Callable[[Front], Iterator[str]]) -> None:
    def resume() -> None:
        eventually(lambda: len(num_pings) >= 3)
        front.call(front.engine.resume)

    with running_beside(resume):
        assert "".join(ask(front)) == TEXT


@pytest.mark.parametrize("ask", CLIENTS)
def test_late_errors_are_raised(front: Front, num_pings: list[int], ask: Callable[[Front], Iterator[str]]) -> None:
    def fail() -> None:
        eventually(lambda: len(num_pings) >= 3)
        front.engine.poison.add(front.engine.received[-1].id)
        front.call(front.engine.resume)

    with running_beside(fail), pytest.raises((openai.APIError, anthropic.APIStatusError, ollama.ResponseError)) as info:
        list(ask(front))
    assert FAILURE in str(info.value)
