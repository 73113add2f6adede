"""Fields that OpenAI's and Anthropic's clients send and that mean little on one's own server: honoured or harmless."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import Front, running_front, saying
from serve.wire import post

from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}
READS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ verbosity }}"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("ok")) as front:
        yield front


def asked(front: Front) -> Any:
    return front.engine.received[-1]


def said(front: Front) -> str:
    """The prompt, whose tokens are bytes."""
    return bytes(token for token in array("i", asked(front).prompt) if token < 256).decode()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(("tier", "priority"), [("auto", 1), ("default", 1), ("flex", 2), ("priority", 0)])
def test_service_tiers_are_priorities(front: Front, path: str, tier: str, priority: int) -> None:
    reply = post(front.port, path, {**BASE[path], "service_tier": tier})
    assert reply.status == 200, reply.body
    assert asked(front).priority == priority
    if path == RESPONSES:
        assert reply.json["service_tier"] == tier.replace("auto", "default")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_tier_and_a_priority_are_one_too_many(front: Front, path: str) -> None:
    refused = post(front.port, path, {**BASE[path], "service_tier": "flex", "priority": "batch"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "service_tier")
    assert post(front.port, path, {**BASE[path], "service_tier": "scale"}).status == 400


def test_verbosity_goes_to_templates_that_read_it(front: Front) -> None:
    for path, fields, field in (
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    ):
        refused = post(front.port, path, {**BASE[path], **fields})
        assert (refused.status, refused.json["error"]["param"]) == (400, field)
        with running_front(saying("ok"), template=ChatTemplate({"default": READS}, {})) as reading:
            assert post(reading.port, path, {**BASE[path], **fields}).status == 200
            assert said(reading).endswith("hilow")
    assert post(front.port, CHAT, {**BASE[CHAT], "verbosity": "medium"}).status == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "auto"}}),
        (RESPONSES, {"prompt_cache_retention": "in-memory", "max_tool_calls": 3}),
        (CHAT, {"messages": [USER, {"role": "assistant", "refusal": "No.", "annotations": [{"type": "x"}]}, USER]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": "a", "phase": "commentary"}, USER]}),
        (
            MESSAGES,
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "text", "text": "a", "citations": [{"type": "x"}]}]},
                    USER,
                ]
            },
        ),
    ],
)
def test_harmless_fields_are_accepted(front: Front, path: str, fields: dict[str, Any]) -> None:
    reply = post(front.port, path, {**BASE[path], **fields})
    assert reply.status == 200, reply.body


def test_a_refusal_is_what_the_assistant_said(front: Front) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert post(front.port, CHAT, {"messages": [USER, message, USER]}).status == 200
    assert "I cannot." in said(front)
    message = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I must not."}]}
    for path, field in ((CHAT, "messages"), (RESPONSES, "input")):
        assert post(front.port, path, {field: [USER, message, USER]}).status == 200
        assert "I must not." in said(front)


def test_beams_name_the_format_that_they_cannot_have(front: Front) -> None:
    beams = {**BASE[CHAT], "num_beams": 2, "temperature": 0, "response_format": {"type": "json_object"}}
    error = post(front.port, CHAT, beams).error
    assert error["param"] == "response_format"
    assert "response_format cannot be combined with beam search" in error["message"]
