"""Answers whose engine is killed go on where they were, to the same text; a request that kills engines is ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.served import Served, serving, wait_until
from helpers.tiny_server import NAME, tiny_options

pytestmark = pytest.mark.live

LETTERS = {"type": "string", "minLength": 12, "maxLength": 12}
LIST = {"type": "array", "items": LETTERS, "minItems": 24, "maxItems": 24}
CALL = {"type": "object", "properties": {"cities": LIST}, "required": ["cities"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CALL, "strict": True}}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LENGTH = 400


def requests() -> list[tuple[str, dict[str, Any]]]:
    """32 in all, most of them streams."""
    made: list[tuple[str, dict[str, Any]]] = []
    free = {"model": NAME, "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    for number in range(4):
        greedy = {**free, "temperature": 0, "prompt": f"greedy {number}"}
        penalised = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1}
        asked = [{"role": "user", "content": f"Say {number}"}]
        chat = {**free, **usage, "messages": asked, "seed": number}
        made += [
            (COMPLETIONS, {**greedy, **usage}),
            (COMPLETIONS, {**free, "prompt": f"seeded {number}", "seed": number, "temperature": 1.1, **penalised}),
            (COMPLETIONS, {**free, "prompt": [7, 8, number], "seed": 5, "n": 3, "logprobs": 2, "echo": True}),
            (COMPLETIONS, {**greedy, "stream": False, "prompt": f"whole {number}", "stop": ["\x00never"]}),
            (CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "l", "schema": LIST}}}),
            (CHAT, {**chat, "tools": TOOLS, "tool_choice": "required"}),
            (CHAT, {**chat, "min_tokens": LENGTH - 50, "ignore_eos": False, "temperature": 1.3}),
            (COMPLETIONS, {**greedy, "stream": False, "prompt": f"beams {number}", "num_beams": 2, "max_tokens": 60}),
        ]
    return made


@dataclass
class Answer:
    """What a client gets, read by a thread of its own."""

    path: str
    body: dict[str, Any]
    request_id: str = ""
    num_events: int = 0
    is_over: bool = False
    said: dict[str, str] = field(default_factory=dict)
    """Text, arguments, finish reasons and log-probabilities, by choice and kind."""
    usage: Any = None
    errors: list[Any] = field(default_factory=list)
    comments: int = 0

    def read(self, port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", self.path, json.dumps(self.body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        self.request_id = answer.headers["x-request-id"]
        for event in self._events(answer):
            self.num_events += 1
            self.usage = event.get("usage") or self.usage
            self.errors += [event["error"]] if "error" in event else []
            for choice in event.get("choices", ()):
                self._take(choice)
        connection.close()
        self.is_over = True

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        if not self.body["stream"]:
            yield json.loads(answer.read())
            return
        for line in answer:
            self.comments += line.startswith(b":")
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or choice.get("message") or {}
        calls = "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ())
        parts = {
            "text": choice.get("text") or delta.get("content") or "",
            "calls": calls,
            "end": choice.get("finish_reason") or "",
            "logprobs": "".join(map(str, (choice.get("logprobs") or {}).get("token_logprobs", ()))),
        }
        for kind, text in parts.items():
            key = f"{choice['index']} {kind}"
            self.said[key] = self.said.get(key, "") + text


def ask_all(served: Served) -> tuple[list[Answer], list[threading.Thread]]:
    answers = [Answer(path, body) for path, body in requests()]
    threads = [threading.Thread(target=answer.read, args=(served.port,)) for answer in answers]
    for thread in threads:
        thread.start()
    return answers, threads


def kill_engine(served: Served) -> None:
    os.kill(served.child("millrace.supervise.engine_child"), signal.SIGKILL)


def resumed(served: Served) -> float:
    return served.metric("millrace_resumed_sequences_total")


def test_32_mixed_answers_survive_the_death_of_their_engine(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--fronts", "2", "--tool-format", "hermes") as served:
        undisturbed, threads = ask_all(served)
        for thread in threads:
            thread.join(120)
        assert [answer.errors for answer in undisturbed if answer.errors or not answer.is_over] == []
        answers, threads = ask_all(served)
        streams = [answer for answer in answers if answer.body["stream"]]
        wait_until(lambda: all(answer.num_events > 5 for answer in streams), "all streams have begun")
        kill_engine(served)
        open_at_kill = [answer for answer in answers if not answer.is_over]
        assert len(open_at_kill) > 16, "too few to tell; the streams are too short"
        for thread in threads:
            thread.join(120)
        for answer, expected in zip(answers, undisturbed, strict=True):
            assert (answer.is_over, answer.errors) == (True, [])
            assert answer.said == expected.said
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert (answer.usage or {}).get(count) == (expected.usage or {}).get(count)
        assert resumed(served) >= len(open_at_kill)
        assert served.metric("millrace_given_up_sequences_total") == 0
        explained = served.request("GET", f"/v1/requests/{streams[0].request_id}/explain")[1]["sequences"][0]
        assert explained["resumed"]["count"] == 1
        assert "engine died" in explained["resumed"]["why"]
        assert "lost" in explained["stages_s"]


def test_a_stream_that_saw_two_engines_die_ends_and_a_later_one_goes_on(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path)) as served:
        twice = iter(served.open_stream(model=NAME, max_tokens=30_000))
        next(twice)
        kill_engine(served)
        wait_until(lambda: resumed(served) == 1, "it goes on")
        once = iter(served.open_stream(model=NAME, max_tokens=1000))
        next(once)
        kill_engine(served)
        last = list(twice)[-1]["error"]
        assert (last["code"], "died 2 times" in last["message"]) == ("request_failed", True)
        assert list(once)[-1]["choices"][0]["finish_reason"] == "length"
        assert (resumed(served), served.metric("millrace_given_up_sequences_total")) == (2, 1)


def test_a_stream_that_waits_can_be_cancelled_through_any_front(tmp_path: Path) -> None:
    with serving(*tiny_options(tmp_path), "--fronts", "2") as served:
        wait_until(lambda: served.metric("millrace_fronts_up") == 2, "two fronts")
        streams = [served.open_stream(model=NAME, max_tokens=30_000) for _ in range(6)]
        events = [iter(stream) for stream in streams]
        for stream in events:
            next(stream)
        kill_engine(served)
        for stream in streams:
            path = f"/v1/requests/{stream.request_id}"
            wait_until(lambda path=path: served.request("DELETE", path)[0] == 200, "whichever front is asked")
        for stream in events:
            assert list(stream)[-1]["error"]["code"] == "request_cancelled"


def test_embeddings_and_responses_in_the_background_survive(tmp_path: Path) -> None:
    asked = {"model": NAME, "input": "Say it", "background": True, "temperature": 0, "max_output_tokens": 3000}
    texts = {"model": NAME, "input": [f"text {number} " * 60 for number in range(64)]}
    with serving(*tiny_options(tmp_path), "--kv-tokens", "65536") as served:

        def respond() -> str:
            return served.request("POST", "/v1/responses", asked)[1]["id"]

        def ended(response_id: str) -> Any:
            found: dict[str, Any] = {}

            def is_over() -> bool:
                found.update(served.request("GET", f"/v1/responses/{response_id}")[1])
                return found["status"] not in ("queued", "in_progress")

            wait_until(is_over, "the response ends", 120.0)
            return found["status"], found["output"][0]["content"][0]["text"]

        vectors = served.request("POST", "/v1/embeddings", texts)[1]["data"]
        expected = ended(respond())
        assert expected[0] in ("completed", "incomplete")
        later: list[Any] = []
        response_id = respond()
        embedding = threading.Thread(
            target=lambda: later.append(served.request("POST", "/v1/embeddings", texts)[1]["data"])
        )
        embedding.start()
        wait_until(lambda: served.metric("millrace_open_requests") == 2 or bool(later), "both run")
        kill_engine(served)
        embedding.join(120)
        assert later == [vectors]
        assert ended(response_id) == expected
        assert resumed(served) > 0
        assert served.metric("millrace_given_up_sequences_total") == 0
