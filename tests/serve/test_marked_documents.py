"""Texts that are marked as documents: every dialect for conversations passes them on, and says what was reused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import END, MODEL, Front, running_front
from serve.wire import CHAT, post

from millrace.link.messages import NewRequest, unpack_tokens

pytestmark = pytest.mark.live

RESPONSES, OLLAMA = "/v1/responses", "/api/chat"
TEXTS = ["Oak beams, " * 20, "rye bread, " * 20]
CACHE = {"type": "document", "recompute": 0.5}
SEEN: list[NewRequest] = []


def script(request: NewRequest) -> list[int]:
    SEEN.append(request)
    return [*b"ok", END]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(script) as running:
        yield running


def marked_texts() -> list[str]:
    """What the engine was told of the last request with documents."""
    asked = [request for request in SEEN if request.documents is not None][-1]
    assert asked.documents is not None
    prompt = bytes(unpack_tokens(asked.prompt).tolist()).decode()
    spans = asked.documents.spans
    assert [span.first - span.start for span in spans] == [-(-(span.end - span.start) // 2) for span in spans]
    return [prompt[span.start : span.end] for span in spans]


def input_parts(role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "input_text", "text": text, "cache": CACHE} for text in TEXTS]}]


@pytest.mark.parametrize("role", ["user", "assistant", "developer"])
def test_responses(front: Front, role: str) -> None:
    reply = post(front.port, RESPONSES, {"model": MODEL, "input": input_parts(role)})
    assert marked_texts() == [text.strip() for text in TEXTS]
    assert reply.json["usage"]["input_tokens_details"]["document_tokens"] == 0
    assert reply.headers["x-millrace-warning"].startswith("approximate: 2 parts")


def test_documents_of_a_stored_response_are_documents_of_the_next_one(front: Front) -> None:
    first = post(front.port, RESPONSES, {"model": MODEL, "input": input_parts("user"), "store": True}).json
    SEEN.clear()
    next_one = {"model": MODEL, "input": "And now?", "previous_response_id": first["id"]}
    assert post(front.port, RESPONSES, next_one).status == 200
    assert marked_texts() == [text.strip() for text in TEXTS]


def test_unmarked_input_is_answered_and_stored_as_before(front: Front) -> None:
    reply = post(front.port, RESPONSES, {"model": MODEL, "input": "hi", "store": True})
    assert "document_tokens" not in reply.json["usage"]["input_tokens_details"]
    assert "x-millrace-warning" not in reply.headers


def test_ollama(front: Front) -> None:
    messages = [{"role": "user", "content": text, "cache": CACHE} for text in TEXTS]
    reply = post(front.port, OLLAMA, {"model": MODEL, "messages": messages, "stream": False})
    assert marked_texts() == [text.strip() for text in TEXTS]
    assert reply.json["document_tokens"] == 0
    assert reply.headers["x-millrace-warning"].startswith("approximate: 2 parts")
    plain = post(front.port, OLLAMA, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": False})
    assert "document_tokens" not in plain.json


def test_an_earlier_answer_in_chat_completions(front: Front) -> None:
    SEEN.clear()
    parts = [{"type": "text", "text": text, "cache": CACHE} for text in TEXTS]
    messages = [{"role": "assistant", "content": parts}, {"role": "user", "content": "And now?"}]
    assert post(front.port, CHAT, {"model": MODEL, "messages": messages}).status == 200
    assert marked_texts() == [text.strip() for text in TEXTS]
