"""Tools in all dialects: what the model sees, and its calls in whole and in streamed answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import Reply, events, post

from millrace.config import Config, replace
from millrace.text.chat.template import ChatTemplate

pytestmark = pytest.mark.live

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome"}'
ANSWER = (
    f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
)
NUM_BEFORE_CUT = ANSWER.index("Rome") + 2
USER = {"role": "user", "content": "hi"}
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %}:{{ m.name }}{% endif %}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(ANSWER)) as front:
        yield front


@pytest.fixture(scope="module")
def tool_front() -> Iterator[Front]:
    """A front whose chat template takes tools."""
    with running_front(saying(ANSWER), template=ChatTemplate({"default": TOOL_TEMPLATE}, {})) as front:
        yield front


def chat(front: Front, **fields: Any) -> Reply:
    return post(front.port, CHAT, {"model": MODEL, "messages": [USER], "tools": [TOOL], **fields})


def prompt_of(front: Front) -> str:
    return front.state.tokenizer.decode(np.frombuffer(front.engine.received[-1].prompt, "<i4").tolist())


def test_no_empty_text_stands_before_a_call() -> None:
    """Clients would make an empty part of it."""
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
    with running_front(saying(call)) as front:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(chat(front, stream=True))]
        assert deltas[0] == {"role": "assistant"}
        assert deltas[1]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert not [delta for delta in deltas if "content" in delta]


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that chat deltas add up to, and the finish reason."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    assert "id" not in call
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return message, finish


def functions(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


# ── chat completions ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_chat_calls_whole_and_streamed(front: Front) -> None:
    [choice] = chat(front).json["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me look."
    assert functions(message["tool_calls"]) == [("get_weather", PARIS), ("get_weather", ROME)]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    chunks = events(chat(front, stream=True))
    streamed, finish = joined(chunks)
    assert (streamed["content"], finish) == ("Let me look.", "tool_calls")
    assert functions(streamed["tool_calls"]) == functions(message["tool_calls"])
    num_deltas = sum("tool_calls" in c["delta"] for chunk in chunks for c in chunk["choices"])
    assert num_deltas > 2 * len(PARIS), "arguments are streamed as they form"


def test_a_call_cut_by_max_tokens_is_not_finished(front: Front) -> None:
    [choice] = chat(front, max_tokens=NUM_BEFORE_CUT).json["choices"]
    assert choice["finish_reason"] == "length"
    assert functions(choice["message"]["tool_calls"]) == [("get_weather", PARIS), ("get_weather", '{"city": "Ro')]
    streamed, finish = joined(events(chat(front, max_tokens=NUM_BEFORE_CUT, stream=True)))
    assert finish == "length"
    assert functions(streamed["tool_calls"]) == functions(choice["message"]["tool_calls"])


def test_without_parallel_calls_the_answer_ends_with_the_first(front: Front) -> None:
    for stream in (False, True):
        reply = chat(front, parallel_tool_calls=False, stream=stream)
        message, finish = joined(events(reply)) if stream else (reply.json["choices"][0]["message"], "tool_calls")
        assert finish == "tool_calls"
        assert functions(message["tool_calls"]) == [("get_weather", PARIS)]
    assert front.engine.aborted[-1][1] == "stop"


def test_without_tools_or_with_none_the_answer_is_text(front: Front) -> None:
    for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
        [choice] = chat(front, **fields).json["choices"]
        assert choice["message"]["content"] == ANSWER
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert "get_weather" not in prompt_of(front)


@pytest.mark.parametrize("stream", [False, True])
def test_fenced_json_that_names_no_function_is_text(stream: bool) -> None:
    text = 'Here it is:\n\n```json\n{"name": "Alice", "age": 3}\n```\nThat is all.'
    config = replace(Config(), server__port=0, model__tool_format="json")
    with running_front(saying(text), config=config) as front:
        reply = chat(front, stream=stream)
        message, finish = (
            joined(events(reply))
            if stream
            else (reply.json["choices"][0]["message"], reply.json["choices"][0]["finish_reason"])
        )
    assert message["content"] == text
    assert not message.get("tool_calls")
    assert finish == "stop"


def test_the_older_form_has_its_own_answer(front: Front) -> None:
    fields = {"tools": None, "functions": [FUNCTION], "function_call": "auto"}
    [choice] = chat(front, **fields).json["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": PARIS}
    chunks = events(chat(front, **fields, stream=True))
    parts = [c["delta"]["function_call"] for chunk in chunks for c in chunk["choices"] if "function_call" in c["delta"]]
    assert parts[0] == {"name": "get_weather", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == PARIS


def test_logprobs_and_token_ids_cover_every_token(front: Front) -> None:
    for stream in (False, True):
        reply = chat(front, logprobs=True, return_token_ids=True, stream=stream)
        choices = [c for chunk in events(reply) for c in chunk["choices"]] if stream else reply.json["choices"]
        ids = [one for choice in choices for one in choice.get("token_ids", ())]
        scored = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert bytes(ids).decode() == ANSWER
        assert "".join(one["token"] for one in scored) == ANSWER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"functions": [FUNCTION]}, "tools"),
        ({"function_call": "none"}, "function_call"),
        ({"tools": None, "functions": [FUNCTION], "tool_choice": "none"}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
            "tool_choice",
        ),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ],
)
def test_wrong_tools_are_refused_by_name(front: Front, fields: dict[str, Any], param: str) -> None:
    reply = chat(front, **fields)
    assert reply.status == 400
    assert reply.error["param"] == param


# ── what the model sees ───────────────────────────────────────────────────────────────────────────────────────────────
HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_a_template_with_tools_gets_them(tool_front: Front) -> None:
    chat(tool_front, messages=HISTORY)
    shown = json.dumps(TOOL, ensure_ascii=False)
    assert prompt_of(tool_front) == (
        f"<tools>{shown}</tools>[user]hi[assistant]<tool_call>c1 get_weather {PARIS}</tool_call>"
        "[tool:get_weather]sunny(c1)"
    )


def test_a_template_without_tools_gets_a_description(front: Front) -> None:
    chat(front, messages=[{"role": "system", "content": "Be brief."}, *HISTORY])
    prompt = prompt_of(front)
    assert prompt.startswith("[system]Be brief.\n\nYou can call functions")
    assert json.dumps(TOOL) in prompt
    assert f'[assistant]<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n' in prompt
    assert "[user]<tool_response>\nsunny\n</tool_response>\n" in prompt


def test_results_beside_each_other_are_one_turn(front: Front) -> None:
    """Many templates without tools want turns of user and assistant to alternate."""
    results = [{"type": "tool_result", "tool_use_id": "c1", "content": []}, {"type": "text", "text": "Go on."}]
    used = [{"type": "tool_use", "id": "c1", "name": "get_weather", "input": {}}]
    blocks = [USER, {"role": "assistant", "content": used}, {"role": "user", "content": results}]
    assert message(front, messages=blocks).status == 200
    assert "[user]<tool_response>\n\n</tool_response>\nGo on.\n" in prompt_of(front)
    chat(front, messages=[*HISTORY, {"role": "tool", "tool_call_id": "c2", "content": "cold"}, USER, USER])
    both = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\ncold\n</tool_response>\nhi\n"
    assert f"[user]{both}[user]hi\n" in prompt_of(front)


def test_the_same_history_in_every_dialect(tool_front: Front) -> None:
    chat(tool_front, messages=HISTORY)
    expected = prompt_of(tool_front)
    used = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}
    blocks = [
        USER,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ]
    tool = {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA}
    body = {"model": MODEL, "max_tokens": 9, "messages": blocks, "tools": [tool]}
    assert post(tool_front.port, MESSAGES, body).status == 200
    assert prompt_of(tool_front) == expected
    items = [
        USER,
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": PARIS},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    assert post(tool_front.port, RESPONSES, {"input": items, "tools": [{"type": "function", **FUNCTION}]}).status == 200
    assert prompt_of(tool_front) == expected
    said = [
        USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    assert post(tool_front.port, OLLAMA, {"model": MODEL, "messages": said, "tools": [TOOL]}).status == 200
    assert prompt_of(tool_front) == expected.replace("c1", "call_1_0")


# ── the other dialects ────────────────────────────────────────────────────────────────────────────────────────────────
def message(front: Front, **fields: Any) -> Reply:
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    return post(
        front.port, MESSAGES, {"model": MODEL, "max_tokens": 400, "messages": [USER], "tools": [tool], **fields}
    )


def sse(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    return [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: {")]


def test_anthropic_blocks(front: Front) -> None:
    answer = message(front).json
    assert answer["stop_reason"] == "tool_use"
    assert all(block["id"].startswith("toolu_") for block in answer["content"] if block["type"] == "tool_use")
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert [block["input"] for block in answer["content"][1:]] == [{"city": "Paris"}, {"city": "Rome"}]
    told = sse(message(front, stream=True))
    starts = [event for event in told if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert [event["index"] for event in told if event["type"] == "content_block_stop"] == [0, 1, 2]
    parts = ["", "", ""]
    for event in told:
        if event["type"] == "content_block_delta":
            parts[event["index"]] += event["delta"].get("partial_json", event["delta"].get("text", ""))
    assert parts == ["Let me look.", PARIS, ROME]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_anthropic_deferred_tools_are_shown_once_they_are_referenced(tool_front: Front) -> None:
    tools = [
        {"name": "search", "input_schema": SCHEMA},
        {"name": "get_weather", "input_schema": SCHEMA, "defer_loading": True},
    ]
    asked = {"model": MODEL, "max_tokens": 9, "tools": tools}
    assert post(tool_front.port, MESSAGES, {**asked, "messages": [USER]}).status == 200
    assert '"search"' in prompt_of(tool_front)
    assert "get_weather" not in prompt_of(tool_front)
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"city": "?"}}
    found = {"type": "tool_reference", "tool_name": "get_weather"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    later = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert post(tool_front.port, MESSAGES, {**asked, "messages": later}).status == 200
    assert '"name": "get_weather"' in prompt_of(tool_front)


def test_anthropic_choices(front: Front) -> None:
    one = message(front, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    none = message(front, tool_choice={"type": "none"}).json
    assert none["content"] == [{"type": "text", "text": ANSWER}]
    cut = message(front, max_tokens=NUM_BEFORE_CUT).json
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][-1]["input"] == {}


def respond(front: Front, **fields: Any) -> Reply:
    return post(front.port, RESPONSES, {"input": "hi", "tools": [{"type": "function", **FUNCTION}], **fields})


def test_responses_items(front: Front) -> None:
    answer = respond(front).json
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
    assert [item["arguments"] for item in answer["output"][1:]] == [PARIS, ROME]
    assert answer["tools"][0]["name"] == "get_weather"
    told = sse(respond(front, stream=True))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    deltas = [event for event in told if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas if event["output_index"] == 1) == PARIS
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert told[-1]["response"]["output"] == done
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]
    following = {"type": "function_call_output", "call_id": done[1]["call_id"], "output": "sunny"}
    again = respond(front, input=[following], previous_response_id=told[-1]["response"]["id"])
    assert again.status == 200
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_of(front)


def test_log_probabilities_of_a_message_are_its_own(front: Front) -> None:
    body = {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["message.output_text.logprobs"],
    }
    whole = post(front.port, RESPONSES, body).json["output"]
    streamed = sse(post(front.port, RESPONSES, {**body, "stream": True}))[-1]["response"]["output"]
    for items in (whole, streamed):
        assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
        assert "".join(one["token"] for one in items[0]["content"][0]["logprobs"]) == "Let me look."


def test_a_cut_response_is_incomplete(front: Front) -> None:
    whole = respond(front, max_output_tokens=NUM_BEFORE_CUT).json
    last = sse(respond(front, max_output_tokens=NUM_BEFORE_CUT, stream=True))[-1]
    for answer in (whole, last["response"]):
        assert answer["status"] == "incomplete"
        assert answer["output"][-1]["status"] == "incomplete"
        assert answer["output"][-1]["arguments"] == '{"city": "Ro'


def test_ollama_calls_have_objects(front: Front) -> None:
    body = {"model": MODEL, "messages": [USER], "tools": [TOOL]}
    answer = post(front.port, OLLAMA, {**body, "stream": False}).json
    calls = [{"city": "Paris"}, {"city": "Rome"}]
    assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == calls
    assert (answer["message"]["content"], answer["done_reason"]) == ("Let me look.", "stop")
    lines = [json.loads(line) for line in post(front.port, OLLAMA, body).body.splitlines()]
    streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in streamed] == calls
    cut = post(front.port, OLLAMA, {**body, "stream": False, "options": {"num_predict": NUM_BEFORE_CUT}}).json
    assert len(cut["message"]["tool_calls"]) == 1
    assert cut["done_reason"] == "length"
    assert '"city": "Ro' in cut["message"]["content"]


def test_the_setting_overrides_the_template() -> None:
    config = replace(Config(), server__port=0, model__tool_format="mistral")
    with running_front(
        saying(f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]'), config=config
    ) as front:
        [call] = chat(front).json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == PARIS
        assert len(call["id"]) == 9


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_half_a_surrogate_pair_in_arguments_does_not_break_the_loop(path: str) -> None:
    """A model may write it; every dialect answers, and takes it back in the history."""
    half = r'{"city": "\ud83d!"}'
    text = f'<tool_call>{{"name": "get_weather", "arguments": {half}}}</tool_call>'
    tool = TOOL if path in (CHAT, OLLAMA) else {"type": "function", **FUNCTION}
    if path == MESSAGES:
        tool = {"name": "get_weather", "input_schema": SCHEMA}
    body: dict[str, Any] = {"model": MODEL, "tools": [tool], "stream": False}
    body |= {"input": [USER]} if path == RESPONSES else {"messages": [USER]}
    with running_front(saying(text)) as front:
        reply = post(front.port, path, body | ({"max_tokens": 900} if path == MESSAGES else {}))
        assert reply.status == 200
        assert "\ufffd!" in json.dumps(reply.json, ensure_ascii=False).replace("\\\\ufffd", "\ufffd")
        past = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": half}}
        history = [USER, {"role": "assistant", "tool_calls": [past]}, {"role": "tool", "tool_call_id": "c1"}]
        history[-1]["content"] = "cold"
        assert post(front.port, CHAT, {"model": MODEL, "messages": history, "tools": [TOOL]}).status == 200


def test_a_message_of_litellm_is_taken_back(front: Front) -> None:
    more = {"provider_specific_fields": {"refusal": None}}
    past = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS, **more}, **more}
    answer = {"role": "assistant", "content": None, "tool_calls": [past], "thinking_blocks": [{}], **more}
    result = {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "cold"}
    assert chat(front, messages=[USER, answer, result]).status == 200


def test_ids_that_a_model_repeats_are_made_unique() -> None:
    call = "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>%s<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call % PARIS}{call % ROME}<|tool_calls_section_end|>"
    config = replace(Config(), server__port=0, model__tool_format="kimi_k2")
    with running_front(saying(text), config=config) as front:
        calls = chat(front).json["choices"][0]["message"]["tool_calls"]
    assert functions(calls) == [("get_weather", PARIS), ("get_weather", ROME)]
    assert calls[0]["id"] == "functions.get_weather:0"
    assert calls[1]["id"] != calls[0]["id"]
