"""`context_management` of Anthropic's messages, with the stock client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import post

from millrace.link.messages import unpack_tokens
from millrace.serve.anthropic.context_edits import CLEARED
from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def turn(number: int, tool: str = "look") -> list[Any]:
    """The assistant thinks and calls a tool; its result is long."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": tool, "input": {"n": number}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"R{number}" * 40}
    thought = {"type": "thinking", "thinking": f"T{number}", "signature": "x"}
    return [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]


MESSAGES: list[Any] = [{"role": "user", "content": "go"}, *turn(1), *turn(2, "find"), *turn(3), *turn(4)]
CLEAR_USES: dict[str, Any] = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 2},
    "keep": {"type": "tool_uses", "value": 1},
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("ok"), template=ChatTemplate({"default": TEMPLATE}, {})) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="any", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, *edits: Any, messages: list[Any] = MESSAGES) -> Any:
    """The edits that were applied."""
    message = client.beta.messages.create(
        model=MODEL,
        max_tokens=9,
        messages=messages,
        betas=["context-management-2025-06-27"],
        context_management={"edits": list(edits)},
    )
    assert message.context_management is not None
    return message.context_management.applied_edits


def sent(front: Front) -> str:
    return bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).decode()


def test_old_tool_results_are_cleared(front: Front, client: anthropic.Anthropic) -> None:
    ask(client)
    whole = sent(front)
    [edit] = ask(client, CLEAR_USES)
    assert edit.type == "clear_tool_uses_20250919"
    assert edit.cleared_tool_uses == 3
    assert edit.cleared_input_tokens == len(whole) - len(sent(front))
    assert [f"R{number}" in sent(front) for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert sent(front).count(CLEARED) == 3
    assert '<look {"n": 1}>' in sent(front)


def test_tools_can_be_excluded_and_arguments_cleared(front: Front, client: anthropic.Anthropic) -> None:
    [edit] = ask(client, CLEAR_USES | {"exclude_tools": ["find"], "clear_tool_inputs": True})
    assert edit.cleared_tool_uses == 2
    assert [f"R{number}" in sent(front) for number in (1, 2, 3, 4)] == [False, True, False, True]
    assert sent(front).count("<look {}>") == 2
    ask(client, CLEAR_USES | {"clear_tool_inputs": ["find"]})
    assert "<find {}>" in sent(front)
    assert '<look {"n": 1}>' in sent(front)


def test_an_edit_waits_for_its_trigger(front: Front, client: anthropic.Anthropic) -> None:
    for change in (
        {"trigger": {"type": "tool_uses", "value": 4}},
        {"trigger": {"type": "input_tokens", "value": 5000}},
        {"trigger": None},  # 100,000 tokens
        {"keep": {"type": "tool_uses", "value": 4}},
        {"clear_at_least": {"type": "input_tokens", "value": 1000}},
    ):
        assert ask(client, CLEAR_USES | change) == [], change
        assert "R1" in sent(front)
    edits = ask(client, CLEAR_USES | {"trigger": {"type": "input_tokens", "value": 100}})
    assert len(edits) == 1


def test_old_thinking_is_cleared(front: Front, client: anthropic.Anthropic) -> None:
    """What the assistant thinks between two messages of the user is one turn."""
    messages = [*MESSAGES, {"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}, *turn(5)]
    thinking = {"type": "clear_thinking_20251015"}
    [edit] = ask(client, thinking, messages=messages)
    assert edit.cleared_thinking_turns == 1
    assert edit.cleared_input_tokens == 4 * len("(T1)")
    assert [f"(T{number})" in sent(front) for number in (1, 4, 5)] == [False, False, True]
    for keep in ("all", {"type": "all"}, {"type": "thinking_turns", "value": 2}):
        assert ask(client, thinking | {"keep": keep}, messages=messages) == []
    both = ask(client, thinking, CLEAR_USES, messages=messages)
    assert [edit.type for edit in both] == ["clear_thinking_20251015", "clear_tool_uses_20250919"]


def test_a_stream_says_it_at_its_end(client: anthropic.Anthropic) -> None:
    with client.beta.messages.stream(
        model=MODEL,
        max_tokens=9,
        messages=MESSAGES,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [CLEAR_USES]},  # type: ignore[typeddict-item]
    ) as stream:
        deltas = [event for event in stream if event.type == "message_delta"]
    edits = deltas[-1].context_management
    assert edits is not None
    assert edits.applied_edits[0].cleared_input_tokens > 0


def test_tokens_are_counted_after_the_edits(front: Front, client: anthropic.Anthropic) -> None:
    plain = client.beta.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert plain.context_management is None
    counted = client.beta.messages.count_tokens(
        model=MODEL,
        messages=MESSAGES,
        context_management={"edits": [CLEAR_USES]},  # type: ignore[typeddict-item]
    )
    ask(client, CLEAR_USES)
    assert counted.input_tokens == len(sent(front)) < plain.input_tokens
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens == plain.input_tokens


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([{"type": "compact_20260112"}], "compact_20260112"),
        ([CLEAR_USES, {"type": "clear_thinking_20251015"}], "send it first"),
        ([CLEAR_USES, CLEAR_USES], "two edits"),
        ([CLEAR_USES | {"keep": {"type": "tool_uses", "value": -1}}], "keep.value"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}], "at least 1"),
        ([{"type": "clear_everything"}], "clear_everything"),
    ],
)
def test_other_edits_are_refused_by_name(front: Front, edits: list[Any], named: str) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES, "context_management": {"edits": edits}}
    reply = post(front.port, "/v1/messages", body)
    assert reply.status == 400
    error = reply.json["error"]
    assert named in error["message"]
    assert error["param"].startswith("context_management.edits")
