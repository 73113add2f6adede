"""Reasoning in all dialects: split from the answer, counted, limited, and together with grammars and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import Reply, events, post

from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
USER = {"role": "user", "content": "hi"}
THOUGHT, SAID = "Let me think.", "Forty-two."
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]<think>\n{# </think> #}"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    template = ChatTemplate({"default": TEMPLATE}, {})
    with running_front(saying(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"), template=template) as front:
        yield front


def chat(front: Front, **fields: Any) -> Reply:
    return post(front.port, CHAT, {"model": MODEL, "messages": [USER], **fields})


def test_chat_splits_and_counts(front: Front) -> None:
    answer = chat(front).json
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID)
    num_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_tokens == len(f"\n{THOUGHT}\n</think>")
    deltas = [c["delta"] for chunk in events(chat(front, stream=True)) for c in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == SAID


def test_a_prompt_that_opens_reasoning() -> None:
    template = ChatTemplate({"default": OPENING}, {})
    with running_front(saying(f"{THOUGHT}</think>{SAID}"), template=template) as front:
        message = chat(front).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAID)
        cut = chat(front, max_tokens=5).json
        assert cut["choices"][0]["message"]["reasoning_content"] == THOUGHT[:5]
        assert cut["choices"][0]["finish_reason"] == "length"


def test_anthropic_thinking_can_be_omitted(front: Front) -> None:
    from serve.test_tool_calls import prompt_of

    hidden = {"type": "adaptive", "display": "omitted"}
    body = {"model": MODEL, "max_tokens": 200, "messages": [USER], "thinking": hidden}
    blocks = post(front.port, MESSAGES, body).json["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("", SAID)
    text = post(front.port, MESSAGES, {**body, "stream": True}).body.decode()
    assert "thinking_delta" not in text
    assert "signature_delta" in text
    said = [USER, {"role": "assistant", "content": blocks}, USER]
    post(front.port, MESSAGES, {**body, "messages": said})
    assert f"[assistant]{SAID}[user]" in prompt_of(front)


def test_other_dialects(front: Front) -> None:
    body = {"model": MODEL, "max_tokens": 200, "messages": [USER]}
    blocks = post(front.port, MESSAGES, body).json["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (THOUGHT, SAID)
    text = post(front.port, MESSAGES, {**body, "stream": True}).body.decode()
    assert text.count("thinking_delta") >= len(THOUGHT) - 3
    assert "signature_delta" in text
    answer = post(front.port, RESPONSES, {"input": "hi", "include": ["reasoning.encrypted_content"]}).json
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    lines = post(front.port, OLLAMA, {"model": MODEL, "messages": [USER], "think": True}).body.splitlines()
    said = [json.loads(line)["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in said) == THOUGHT
    assert "".join(message["content"] for message in said) == SAID


def test_counted_as_it_is_asked(front: Front) -> None:
    """Turning reasoning off adds markers to the prompt, which a count must contain."""
    body = {"model": MODEL, "messages": [USER]}
    counts = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
    for path, free, off in (
        (counts[0], body, {**body, "thinking": {"type": "disabled"}}),
        (counts[1], {"input": "hi"}, {"input": "hi", "reasoning": {"effort": "none"}}),
    ):
        added = post(front.port, path, off).json["input_tokens"] - post(front.port, path, free).json["input_tokens"]
        assert added == len("<think>\n\n</think>\n\n")


def test_ollama_lists_the_capability(front: Front) -> None:
    assert post(front.port, "/api/show", {"model": MODEL}).json["capabilities"] == ["completion", "tools", "thinking"]


def test_reasoning_can_be_turned_off(front: Front) -> None:
    from serve.test_tool_calls import prompt_of

    off = [
        (CHAT, {"model": MODEL, "messages": [USER], "reasoning_effort": "none"}),
        (CHAT, {"model": MODEL, "messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}),
        (MESSAGES, {"model": MODEL, "max_tokens": 9, "messages": [USER], "thinking": {"type": "disabled"}}),
        (OLLAMA, {"model": MODEL, "messages": [USER], "think": False}),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "none"}}),
    ]
    for path, body in off:
        assert post(front.port, path, body).status == 200
        assert prompt_of(front).endswith("<think>\n\n</think>\n\n"), path


def test_past_reasoning_reaches_the_template(front: Front) -> None:
    from serve.test_tool_calls import prompt_of

    past = {"role": "assistant", "content": "a", "reasoning_content": "because"}
    chat(front, messages=[USER, past, USER])
    assert "[assistant]<think>because</think>a[user]" in prompt_of(front)
    blocks = [{"type": "thinking", "thinking": "because", "signature": "x"}, {"type": "text", "text": "a"}]
    said = [USER, {"role": "assistant", "content": blocks}, USER]
    post(front.port, MESSAGES, {"model": MODEL, "max_tokens": 9, "messages": said})
    assert "[assistant]<think>because</think>a[user]" in prompt_of(front)


def test_a_grammar_starts_after_the_reasoning(front: Front) -> None:
    assert chat(front, response_format={"type": "json_object"}).status == 200
    grammar = front.engine.received[-1].params.grammar
    assert grammar is not None
    assert grammar.after.startswith('before: ( "<think>" thoughts')
    assert chat(front, response_format={"type": "json_object"}, reasoning_effort="none").status == 200
    grammar = front.engine.received[-1].params.grammar
    assert grammar is not None
    assert grammar.after == ""


def test_a_model_without_reasoning_refuses_to_reason() -> None:
    with running_front(saying("ok")) as front:
        for path, body, param in [
            (CHAT, {"model": MODEL, "messages": [USER], "reasoning_effort": "high"}, "reasoning_effort"),
            (RESPONSES, {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ]:
            reply = post(front.port, path, body)
            assert (reply.status, reply.error["param"]) == (400, param)
        assert chat(front, reasoning_effort="none").status == 200


WARNING = "x-millrace-warning"


def test_an_effort_of_anthropic_is_accepted_by_every_model(front: Front) -> None:
    body = {"model": MODEL, "max_tokens": 99, "messages": [USER], "output_config": {"effort": "low"}}
    sent = [body, {**body, "thinking": {"type": "adaptive"}}, {**body, "stream": True}]
    with running_front(saying("ok")) as plain:
        for one in sent:
            reply = post(plain.port, MESSAGES, one)
            assert (reply.status, reply.headers[WARNING]) == (
                200,
                "the effort 'low' had no effect: this model does not reason",
            )
        refused = post(plain.port, MESSAGES, {**body, "thinking": {"type": "enabled"}})
        assert (refused.status, refused.json["error"]["param"]) == (400, "thinking")
        assert post(plain.port, f"{MESSAGES}/count_tokens", {**body, "max_tokens": None}).status == 200
    for one in sent:  # The markers of this model are several tokens.
        reply = post(front.port, MESSAGES, one)
        assert (reply.status, reply.headers[WARNING]) == (
            200,
            "the effort 'low' had no effect: this model takes no effort",
        )
    reads_effort = ChatTemplate({"default": TEMPLATE + "{{ reasoning_effort }}"}, {})
    with running_front(saying("ok"), template=reads_effort) as telling:
        from serve.test_tool_calls import prompt_of

        for one in sent:
            reply = post(telling.port, MESSAGES, one)
            assert (reply.status, reply.headers.get(WARNING)) == (200, None)
            assert prompt_of(telling).endswith("[assistant]low")


def test_a_budget_needs_markers_of_one_token(front: Front) -> None:
    assert chat(front, thinking_token_budget=8).error["param"] == "thinking_token_budget"
