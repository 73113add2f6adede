"""Chat completions made with `store`: whole and streamed ones are kept alike, listed, labelled and deleted."""

from __future__ import annotations

from typing import Any

import pytest
from serve.front_under_test import MODEL, running_front, saying
from serve.wire import CHAT, chat_text, get, post, request, stream

pytestmark = pytest.mark.live


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def test_stored_completions() -> None:
    with running_front(saying("Hello")) as front:
        port = front.port
        whole = post(port, CHAT, body(store=True, metadata={"topic": "a"}, logprobs=True)).json
        chunks = stream(port, CHAT, body(store=True, stream=True, metadata={"topic": "b"}, logprobs=True, n=2))
        assert chat_text(chunks) == "Hello"
        post(port, CHAT, body())
        listed = get(port, CHAT).json
        assert [one["id"] for one in listed["data"]] == [whole["id"], chunks[0]["id"]]
        kept = listed["data"][1]
        assert [choice["message"] for choice in kept["choices"]] == [whole["choices"][0]["message"]] * 2
        assert kept["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]
        assert kept["choices"][1]["finish_reason"] == "stop"
        assert get(port, f"{CHAT}?limit=1").json["has_more"]
        assert [one["id"] for one in get(port, f"{CHAT}?metadata%5Btopic%5D=b").json["data"]] == [chunks[0]["id"]]
        assert get(port, f"{CHAT}?colour=red").status == 400
        at = f"{CHAT}/{whole['id']}"
        assert get(port, at).json == {**whole, "metadata": {"topic": "a"}}
        assert post(port, at, {"metadata": {"topic": "c"}}).json["metadata"] == {"topic": "c"}
        [message] = get(port, f"{at}/messages").json["data"]
        assert (message["role"], message["content"]) == ("user", "hi")
        assert request(port, "DELETE", at).json == {
            "id": whole["id"],
            "object": "chat.completion.deleted",
            "deleted": True,
        }
        assert get(port, at).status == 404


def test_calls_are_stored_with_what_they_belong_to() -> None:
    function = {"name": "now"}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    with running_front(saying('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')) as front:
        for fields in ({"functions": [function]}, {"tools": [{"type": "function", "function": function}]}):
            wanted = body(store=True, messages=messages, **fields)
            whole = post(front.port, CHAT, wanted).json
            chunks = stream(front.port, CHAT, {**wanted, "stream": True})
            kept = get(front.port, f"{CHAT}/{chunks[0]['id']}").json["choices"][0]
            expected = whole["choices"][0]
            for choice in (kept, expected):
                for one in choice["message"].get("tool_calls", ()):
                    del one["id"]
            assert kept == expected
        shown = get(front.port, f"{CHAT}/{whole['id']}/messages").json["data"]
        assert shown[1]["tool_calls"][0]["id"] == shown[2]["tool_call_id"] == "c1"
        assert "name" not in shown[0]
