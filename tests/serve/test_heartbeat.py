"""Streams of every dialect while nothing is generated: the HTTP head, pings, and errors that come after them."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from serve.front_under_test import END, MODEL, Front, running_front, saying
from serve.wire import eventually, post

from millrace.link.messages import NewRequest
from millrace.params.grammar import Grammar
from millrace.serve.generate import grammars, heartbeat
from millrace.serve.openai import routes as openai_routes
from millrace.text.grammar.compiler import GrammarCompiler, Unusable

pytestmark = pytest.mark.live

TEXT = "Hello there, world"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NUM_BEFORE_PAUSE = CALL.index("Paris")

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "anthropic": ("/v1/messages", {"messages": [USER], "max_tokens": 100}),
    "ollama chat": ("/api/chat", {"messages": [USER]}),
    "ollama generate": ("/api/generate", {"prompt": "hi"}),
}
WITH_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **TOOL["function"]}]}),
    "anthropic": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 500, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    "ollama chat": ("/api/chat", {"messages": [USER], "tools": [TOOL]}),
}


REGEX = {"structured_outputs": {"regex": "a"}}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
FORMATS: dict[str, dict[str, Any]] = {
    "chat": REGEX,
    "completions": REGEX,
    "responses": {"text": {"format": {**JSON_SCHEMA, "name": "city"}}},
    "anthropic": {"output_config": {"format": JSON_SCHEMA}},
    "ollama chat": {"format": SCHEMA},
    "ollama generate": {"format": SCHEMA},
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 0.02)
    monkeypatch.setattr(heartbeat, "PING_EVERY_S", 0.02)


@contextmanager
def asking(front: Front, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """A stream whose head has arrived."""
    with closing(http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)) as connection:
        sent = json.dumps({"model": MODEL, "stream": True, **body})
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        yield connection.getresponse()


def is_ping(dialect: str, frame: str) -> bool:
    if dialect == "anthropic":
        return frame.startswith("event: ping\n")
    if dialect.startswith("ollama"):
        line = json.loads(frame)
        said = line.get("message", line)
        return not line["done"] and not (said.get("response") or said.get("content") or said.get("tool_calls"))
    return frame.startswith(": ")


def separator(dialect: str) -> str:
    return "\n" if dialect.startswith("ollama") else "\n\n"


def read_pings(dialect: str, answer: http.client.HTTPResponse, count: int = 2) -> str:
    """Read until so many pings have come."""
    text, end = "", separator(dialect)
    while sum(is_ping(dialect, frame) for frame in text.split(end)[:-1] if frame.strip()) < count:
        piece = answer.read1(65536)
        assert piece, text
        text += piece.decode()
    return text


def events_of(dialect: str, text: str) -> list[dict[str, Any]]:
    """The frames without comments, decoded."""
    frames = [frame for frame in text.split(separator(dialect)) if frame.strip() and not frame.startswith(": ")]
    if dialect.startswith("ollama"):
        return [json.loads(frame) for frame in frames]
    return [json.loads(frame.partition("data: ")[2]) for frame in frames if "[DONE]" not in frame]


def answered(dialect: str, text: str) -> str:
    """The text of the answer's frames, whatever else they carry."""
    events = events_of(dialect, text)
    if dialect.startswith("ollama"):
        return "".join(line["response"] if "response" in line else line["message"]["content"] for line in events)
    if dialect == "chat":
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    if dialect == "completions":
        return "".join(choice["text"] for event in events for choice in event["choices"])
    if dialect == "anthropic":
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def arguments_of(dialect: str, text: str) -> Any:
    """The arguments of the one call."""
    events = events_of(dialect, text)
    if dialect == "ollama chat":
        [call] = [call for line in events for call in line["message"].get("tool_calls", ())]
        return call["function"]["arguments"]
    if dialect == "chat":
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        parts = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    elif dialect == "anthropic":
        parts = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    else:
        parts = [event["arguments"] for event in events if event["type"] == "response.function_call_arguments.done"]
    return json.loads("".join(parts))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dialect", PLAIN)
def test_a_stream_that_waits_has_a_head_and_pings(dialect: str) -> None:
    path, body = PLAIN[dialect]
    with running_front(saying(TEXT)) as front:
        front.call(front.engine.pause)
        with asking(front, path, body) as answer:
            assert answer.status == 200
            kind = "application/x-ndjson" if dialect.startswith("ollama") else "text/event-stream; charset=utf-8"
            assert answer.headers["Content-Type"] == kind
            begun = read_pings(dialect, answer)
            assert answered(dialect, begun) == ""
            front.call(front.engine.resume)
            assert answered(dialect, begun + answer.read().decode()) == TEXT


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dialect", ["responses", "anthropic"])
def test_events_begin_with_the_preamble_and_have_it_once(dialect: str) -> None:
    path, body = PLAIN[dialect]
    first = {"responses": "event: response.created\n", "anthropic": "event: message_start\n"}[dialect]
    with running_front(saying(TEXT)) as front:
        front.call(front.engine.pause)
        with asking(front, path, body) as answer:
            begun = read_pings(dialect, answer)
            assert begun.startswith(first)
            front.call(front.engine.resume)
            assert answer.read().decode().count(first) == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dialect", WITH_TOOLS)
def test_a_call_that_is_held_back_is_no_silence(dialect: str) -> None:
    path, body = WITH_TOOLS[dialect]
    running: list[Front] = []

    def pausing(request: NewRequest) -> Iterator[int]:
        data = [*CALL.encode(), END]
        yield from data[:NUM_BEFORE_PAUSE]
        running[0].engine.paused = True
        yield from data[NUM_BEFORE_PAUSE:]

    with running_front(pausing) as front:
        running.append(front)
        with asking(front, path, body) as answer:
            eventually(lambda: front.engine.paused)
            begun = read_pings(dialect, answer)
            front.call(front.engine.resume)
            assert arguments_of(dialect, begun + answer.read().decode()) == {"city": "Paris"}


@pytest.mark.parametrize("dialect", PLAIN)
def test_only_a_silent_stream_is_pinged(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heart beats by hand here: after each of three pieces of text, and once more in the last pause."""
    monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 3600.0)
    path, body = PLAIN[dialect]
    running: list[Front] = []

    def in_pieces(request: NewRequest) -> Iterator[int]:
        yield from b"one "
        for piece in ("two ", "three ", "four"):
            running[0].engine.paused = True  # After this step, which gives the next piece's first letter.
            yield from piece.encode()

    def beat() -> None:
        [job] = front.state.jobs
        assert job.out is not None
        job.out.keep_alive(b"PING", after_preamble=True)

    with running_front(in_pieces) as front:
        running.append(front)
        with asking(front, path, body) as answer:
            for number in range(3):
                eventually(lambda: front.engine.paused)
                front.call(beat)
                if number == 2:
                    front.call(beat)
                front.call(front.engine.resume)
            text = answer.read().decode()
    assert text.count("PING") == 1
    assert answered(dialect, text.replace("PING", "")) == "one two three four"


ERRORS = {
    "chat": ("data: ", lambda body: body["error"]["message"]),
    "completions": ("data: ", lambda body: body["error"]["message"]),
    "responses": ("event: error\ndata: ", lambda body: body["message"]),
    "anthropic": ("event: error\ndata: ", lambda body: body["error"]["message"]),
    "ollama chat": ("", lambda body: body["error"]),
    "ollama generate": ("", lambda body: body["error"]),
}


def last_error(dialect: str, text: str) -> str:
    frames = [frame for frame in text.split(separator(dialect)) if frame.strip()]
    if frames[-1] == "data: [DONE]":
        frames.pop()
    start, message = ERRORS[dialect]
    assert frames[-1].startswith(start)
    said: str = message(json.loads(frames[-1].removeprefix(start)))
    return said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dialect", PLAIN)
def test_an_error_after_the_head_ends_the_stream(dialect: str) -> None:
    path, body = PLAIN[dialect]
    with running_front(saying(TEXT)) as front:
        front.call(front.engine.pause)
        with asking(front, path, body) as answer:
            begun = read_pings(dialect, answer)
            front.engine.poison.add(front.engine.received[-1].id)
            front.call(front.engine.resume)
            text = begun + answer.read().decode()
        assert last_error(dialect, text) == "The step that computed this request failed."
        if dialect == "responses":
            numbers = [json.loads(line[6:])["sequence_number"] for line in text.split("\n") if line[:6] == "data: "]
            assert numbers == [0, 1, 2, 3]
            assert "event: response.failed" in text
        eventually(lambda: front.state.metrics.counts.errors == 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dialect", FORMATS)
def test_a_request_found_wrong_late_is_told_in_the_stream_and_early_by_a_status(
    monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    path, extra = PLAIN[dialect][0], {**PLAIN[dialect][1], **FORMATS[dialect]}
    may_end = threading.Event()

    def check(grammar: Grammar) -> Unusable:
        may_end.wait(60)
        return Unusable("It cannot be done.")

    monkeypatch.setattr(grammars, "CHECK_LIMIT_S", 60.0)
    with running_front(saying(TEXT)) as front:
        monkeypatch.setattr(front.state, "grammar_check", GrammarCompiler(check))
        with asking(front, path, extra) as answer:
            assert answer.status == 200
            begun = read_pings(dialect, answer)
            may_end.set()
            text = begun + answer.read().decode()
        assert last_error(dialect, text) == "It cannot be done."
        eventually(lambda: front.state.metrics.counts.client_errors == 1)
        monkeypatch.setattr(heartbeat, "HEAD_AFTER_S", 3600.0)
        assert post(front.port, path, {"model": MODEL, "stream": True, **extra}).status == 400
        front.state.grammar_check.close()


@pytest.mark.usefixtures("quick")
def test_a_bug_after_the_head_is_an_error_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    may_fail = threading.Event()
    prepare = openai_routes.prepare_chat

    async def failing(state: Any, data: bytes, received: float, owner: str) -> Any:
        await asyncio.to_thread(may_fail.wait, 60)
        await prepare(state, data, received, owner)
        raise ZeroDivisionError

    monkeypatch.setattr(openai_routes, "prepare_chat", failing)
    with running_front(saying(TEXT)) as front, asking(front, "/v1/chat/completions", {"messages": [USER]}) as answer:
        begun = read_pings("chat", answer)
        may_fail.set()
        assert "The server failed on this request" in last_error("chat", begun + answer.read().decode())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dialect", PLAIN)
def test_whole_answers_have_no_early_head(dialect: str) -> None:
    path, body = PLAIN[dialect]
    with running_front(saying(TEXT), step_s=0.01) as front:
        assert (
            post(front.port, path, {"model": MODEL, **body, "stream": False})
            .headers["content-type"]
            .startswith("application/json")
        )


def test_the_head_comes_within_two_seconds() -> None:
    assert heartbeat.HEAD_AFTER_S < 2
    assert 2 * heartbeat.PING_EVERY_S <= 10
