"""Answers of every dialect while their engine is gone, and after the next one has taken over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, VOCAB, Front, endless, running_front
from serve.null_engine import NullEngine
from serve.test_lifecycle import in_background
from serve.wire import CHAT, connected, eventually, get, raw_post, read_all, request

from millrace.link.messages import NewRequest
from millrace.serve.describe import sampler

pytestmark = pytest.mark.live

NUM_TOKENS = 60
ASKED = [{"role": "user", "content": "Hi"}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": ASKED, "max_tokens": NUM_TOKENS}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": NUM_TOKENS}),
    ("/v1/messages", {"messages": ASKED, "max_tokens": NUM_TOKENS}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": NUM_TOKENS}),
    ("/api/chat", {"messages": ASKED, "options": {"num_predict": NUM_TOKENS}}),
]
ALPHABET = "".join(chr(97 + number % 26) for number in range(NUM_TOKENS))
COMMENT = b": the engine is being restarted"


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    monkeypatch.setattr(sampler, "COMMENT_EVERY_S", 0.01)

    def halting(request: NewRequest) -> Iterator[int]:
        """The engine pauses itself in the middle of an answer, so that no answer ends before the engine is lost."""
        for number, token in enumerate(endless(request)):
            if number == NUM_TOKENS // 2:
                running.engine.pause()
            yield token

    with running_front(halting, resume_s=3600.0) as running:
        yield running


def lose_engine(front: Front) -> None:
    """In the middle of every answer."""
    eventually(lambda: front.engine.paused)
    assert all(0 < row.num_output < NUM_TOKENS for row in front.engine.rows.values())
    front.call(lambda: front.engine.die("The engine process ended."))


def replace_engine(front: Front, *, is_paused: bool = False) -> None:
    def reconnect() -> None:
        front.engine = NullEngine(endless, vocab_size=VOCAB)
        front.engine.paused = is_paused
        front.state.client.reconnect(front.engine)

    front.call(reconnect)


def text_of(answer: bytes) -> str:
    """The text of a stream in any dialect."""
    text = ""
    for line in answer.decode().splitlines():
        if line.startswith(("data: {", "{")):
            event = json.loads(line.removeprefix("data: "))
            choice = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or event.get("delta") or event.get("message") or {}
            text += choice.get("text") or (delta if isinstance(delta, str) else "")
            text += (delta.get("content") or delta.get("text") or "") if isinstance(delta, dict) and delta else ""
    return text


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
def test_a_stream_goes_on_and_is_kept_alive_meanwhile(front: Front, path: str, body: dict[str, Any]) -> None:
    with connected(front.port) as sock:
        sock.sendall(raw_post(path, {"model": MODEL, "stream": True, **body}, headers="Connection: close\r\n"))
        answer = sock.recv(1000)
        lose_engine(front)
        [listed] = get(front.port, "/v1/requests").json["data"]
        assert listed["awaits_engine"]
        if path.startswith("/v1"):
            while COMMENT not in answer:
                answer += sock.recv(1000)
        replace_engine(front)
        answer += read_all(sock)
    body_lines = b"\n".join(line for line in answer.split(b"\r\n") if not line.strip().isalnum())
    assert (COMMENT in answer) == path.startswith("/v1"), "lines of JSON have no comments"
    assert text_of(body_lines) == ALPHABET
    assert front.engine.received[0].resumed is not None


def test_an_answer_that_is_sent_whole_goes_on(front: Front) -> None:
    reply = in_background(front, {"model": MODEL, "messages": ASKED, "max_tokens": NUM_TOKENS, "n": 2})
    lose_engine(front)
    replace_engine(front)
    answer = reply.result(60).json
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ALPHABET] * 2
    assert answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS


def test_an_answer_that_waits_can_be_cancelled(front: Front) -> None:
    reply = in_background(front, {"model": MODEL, "messages": ASKED, "max_tokens": NUM_TOKENS, "n": 2})
    lose_engine(front)
    [listed] = get(front.port, "/v1/requests").json["data"]
    assert request(front.port, "DELETE", "/v1/requests/another").status == 503
    cancelled = request(front.port, "DELETE", f"/v1/requests/{listed['id']}").json
    assert (cancelled["cancelled"], cancelled["sequences"]) == (True, 2)
    assert (reply.result(60).status, reply.result().error["code"]) == (499, "request_cancelled")
    replace_engine(front)
    assert front.engine.received == []


def test_an_answer_that_was_there_when_two_engines_died_fails_for_good(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    reply = in_background(front, {"model": MODEL, "messages": ASKED, "max_tokens": NUM_TOKENS, "n": 2})
    lose_engine(front)
    replace_engine(front, is_paused=True)
    eventually(lambda: len(front.engine.received) == 2)
    front.call(lambda: front.engine.die("The engine process ended again."))
    result = reply.result(60)
    assert (result.status, result.error["code"]) == (500, "request_failed"), "a 503 would be sent again"
    assert "died 2 times" in result.error["message"]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
