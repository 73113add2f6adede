"""`truncate_prompt_tokens`: never a default, and the answer reports how many tokens were cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import CHAT, COMPLETIONS, post, stream

from millrace.link.messages import unpack_tokens

pytestmark = pytest.mark.live

LONG = "abcdefghij" * 30


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("fine"), max_context=128) as running:
        yield running


def sent_prompt(front: Front) -> str:
    """The last prompt that the engine received, as text."""
    return bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).decode()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": LONG, "max_tokens": 8, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "max_tokens": 8, **fields}


def test_nothing_is_cut_by_default(front: Front) -> None:
    assert post(front.port, COMPLETIONS, completion()).error["code"] == "context_length_exceeded"
    assert post(front.port, CHAT, chat()).error["code"] == "context_length_exceeded"


def test_the_last_tokens_stay(front: Front) -> None:
    answer = post(front.port, COMPLETIONS, completion(truncate_prompt_tokens=12)).json
    assert sent_prompt(front) == LONG[-12:]
    assert answer["usage"]["prompt_tokens"] == 12
    assert answer["choices"][0]["truncated_prompt_tokens"] == len(LONG) - 12


def test_as_many_as_fit(front: Front) -> None:
    answer = post(front.port, CHAT, chat(truncate_prompt_tokens=-1)).json
    assert answer["usage"]["prompt_tokens"] == 128 - 8
    rendered = len(f"[user]{LONG}\n[assistant]")
    assert answer["truncated_prompt_tokens"] == rendered - 120
    assert answer["choices"][0]["message"]["content"] == "fine"


def test_a_short_prompt_is_not_cut_and_reports_zero(front: Front) -> None:
    answer = post(front.port, COMPLETIONS, completion(prompt=["hi", [1, 2, 3]][0], truncate_prompt_tokens=50)).json
    assert answer["choices"][0]["truncated_prompt_tokens"] == 0
    assert "truncated_prompt_tokens" not in post(front.port, COMPLETIONS, completion(prompt="hi")).json["choices"][0]


def test_streams_report_the_cut(front: Front) -> None:
    chunks = stream(front.port, CHAT, chat(truncate_prompt_tokens=-1))
    assert [chunk["truncated_prompt_tokens"] for chunk in chunks if "truncated_prompt_tokens" in chunk] == [198]
    chunks = stream(front.port, COMPLETIONS, completion(truncate_prompt_tokens=100))
    cut = [choice.get("truncated_prompt_tokens") for chunk in chunks for choice in chunk["choices"]]
    assert cut[0] == len(LONG) - 100


def test_an_echo_shows_the_cut_prompt(front: Front) -> None:
    answer = post(front.port, COMPLETIONS, completion(truncate_prompt_tokens=5, echo=True)).json
    assert answer["choices"][0]["text"] == LONG[-5:] + "fine"


def test_a_cut_prompt_that_does_not_fit_is_refused(front: Front) -> None:
    reply = post(front.port, COMPLETIONS, completion(truncate_prompt_tokens=125))
    assert reply.error["code"] == "context_length_exceeded"
    assert all(number in reply.error["message"] for number in ("125", "8", "128"))


def test_ollama_drops_the_oldest_messages() -> None:
    messages = [{"role": "system", "content": "S."}, *({"role": "user", "content": f"{n}" * 40} for n in range(6))]
    with running_front(saying("ok")) as front:
        body = {"model": front.state.model_name, "messages": messages, "options": {"num_ctx": 150, "num_predict": 4}}
        assert post(front.port, "/api/chat", {**body, "stream": False}).status == 400
        answer = post(front.port, "/api/chat", {**body, "stream": False, "truncate": True}).json
        assert answer["truncated_messages"] > 0
        assert answer["prompt_eval_count"] + 4 <= 150
        sent = bytes(token for token in array("i", front.engine.received[-1].prompt) if token < 256).decode()
        assert "S." in sent
        assert "5" * 40 in sent
        assert "0" * 40 not in sent
        short = {**body, "messages": messages[-1:], "truncate": True, "stream": False}
        assert post(front.port, "/api/chat", short).json["truncated_messages"] == 0
        assert "truncated_messages" not in post(front.port, "/api/chat", {**short, "truncate": False}).json


def test_ollama_cuts_a_prompt_after_its_first_tokens(front: Front) -> None:
    body = {"model": MODEL, "prompt": LONG, "raw": True, "stream": False, "options": {"num_ctx": 60, "num_predict": 10}}
    assert post(front.port, "/api/generate", body).status == 400
    answer = post(front.port, "/api/generate", {**body, "truncate": True}).json
    assert sent_prompt(front) == LONG[:4] + LONG[-46:]
    assert answer["truncated_prompt_tokens"] == len(LONG) - 50
    body["options"] = {"num_predict": 28, "num_keep": 10}
    post(front.port, "/api/generate", {**body, "truncate": True})
    assert sent_prompt(front) == LONG[:10] + LONG[-90:]
    short = post(front.port, "/api/generate", {**body, "prompt": "hi", "truncate": True}).json
    assert short["truncated_prompt_tokens"] == 0
    assert "truncated_prompt_tokens" not in post(front.port, "/api/generate", {**body, "prompt": "hi"}).json
