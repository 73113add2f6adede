"""Responses that continue stored conversations, drop what does not fit, and accept what changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serve.front_under_test import Front, running_front, saying
from serve.wire import get, post, request

from millrace.link.messages import unpack_tokens

pytestmark = pytest.mark.live

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("yes")) as running:
        yield running


def prompt_of(front: Front) -> str:
    return bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).decode()


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def test_a_conversation_grows_with_each_response(front: Front) -> None:
    made = post(front.port, CONVERSATIONS, {"items": [said("Be brief.", "system")], "metadata": {"a": "b"}}).json
    at = f"{CONVERSATIONS}/{made['id']}"
    assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
    assert get(front.port, at).json == made
    first = post(front.port, RESPONSES, {"input": "one?", "conversation": made["id"]}).json
    assert first["conversation"] == {"id": made["id"]}
    post(front.port, RESPONSES, {"input": "two?", "conversation": {"id": made["id"]}, "store": False, "stream": True})
    assert prompt_of(front) == "[system]Be brief.\n[user]one?\n[assistant]yes\n[user]two?\n[assistant]"
    listed = get(front.port, f"{at}/items?order=asc&limit=4").json
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Be brief.", "one?", "yes", "two?"]
    assert listed["has_more"]
    rest = get(front.port, f"{at}/items?order=asc&after={listed['last_id']}").json
    assert [item["role"] for item in rest["data"]] == ["assistant"]
    added = post(front.port, f"{at}/items", {"items": [said("note")]}).json["data"][0]
    assert get(front.port, f"{at}/items/{added['id']}").json == added
    assert request(front.port, "DELETE", f"{at}/items/{added['id']}").status == 200
    assert get(front.port, f"{at}/items/{added['id']}").status == 404
    assert post(front.port, at, {"metadata": {"c": "d"}}).json["metadata"] == {"c": "d"}
    assert request(front.port, "DELETE", at).json["deleted"] is True
    assert get(front.port, at).status == 404
    reply = post(front.port, RESPONSES, {"input": "x", "conversation": made["id"]})
    assert (reply.status, reply.json["error"]["param"]) == (404, "conversation")


def test_what_items_cannot_include_is_refused(front: Front) -> None:
    at = f"{CONVERSATIONS}/{post(front.port, CONVERSATIONS, {'items': [said('a')]}).json['id']}/items"
    item = get(front.port, at).json["data"][0]["id"]
    for reply in (
        get(front.port, f"{at}?include=web_search_call.results"),
        get(front.port, f"{at}/{item}?include[]=web_search_call.results"),
        post(front.port, f"{at}?include=web_search_call.results", {"items": [said("b")]}),
    ):
        assert (reply.status, reply.error["param"]) == (400, "include")
    assert len(get(front.port, f"{at}?include=message.output_text.logprobs").json["data"]) == 1


def test_a_conversation_can_be_empty_at_first(front: Front) -> None:
    made = request(front.port, "POST", CONVERSATIONS).json
    assert get(front.port, f"{CONVERSATIONS}/{made['id']}/items").json["data"] == []
    previous = post(front.port, RESPONSES, {"input": "x"}).json["id"]
    both = {"input": "x", "conversation": made["id"], "previous_response_id": previous}
    reply = post(front.port, RESPONSES, both)
    assert (reply.status, reply.json["error"]["param"]) == (400, "conversation")
    wrong = post(front.port, CONVERSATIONS, {"items": [{"role": "nobody", "content": "x"}]})
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "items[0].role")


def test_what_does_not_fit_is_dropped_only_on_request(front: Front) -> None:
    turns = [said("Be brief.", "system"), *(said(f"{number} " + "x" * 900) for number in range(6)), said("last")]
    refused = post(front.port, RESPONSES, {"input": turns, "max_output_tokens": 20})
    assert refused.json["error"]["code"] == "context_length_exceeded"
    answer = post(front.port, RESPONSES, {"input": turns, "max_output_tokens": 20, "truncation": "auto"}).json
    assert (answer["truncation"], answer["truncated_input_items"]) == ("auto", 2)
    prompt = prompt_of(front)
    assert prompt.startswith("[system]Be brief.\n[user]2 x")
    assert prompt.endswith("[user]last\n[assistant]")
    whole = post(front.port, RESPONSES, {"input": "hi", "truncation": "auto"}).json
    assert whole["truncated_input_items"] == 0
    hopeless = post(front.port, RESPONSES, {"input": "x" * 9000, "truncation": "auto"})
    assert hopeless.json["error"]["code"] == "context_length_exceeded"


def test_encrypted_reasoning_is_accepted(front: Front) -> None:
    answer = post(front.port, RESPONSES, {"input": "hi", "include": ["reasoning.encrypted_content"]})
    assert answer.status == 200
    assert answer.json["output"][0]["content"][0]["logprobs"] == []
    refused = post(front.port, RESPONSES, {"input": "hi", "include": ["file_search_call.results"]})
    assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_parameter")


def test_tokenizer_info(front: Front) -> None:
    info = get(front.port, "/tokenizer_info").json
    assert info["vocab_size"] == 300
    assert list(info["end_tokens"].values()) == [299]
    assert info["model_max_length"] == 4096
    assert info["chat_template"] == front.state.template.source  # Which may not be the one in the model's files.
    allow = request(front.port, "DELETE", "/v1/responses/input_tokens")
    assert (allow.status, allow.headers["allow"]) == (405, "POST")


def test_an_item_of_a_stored_response_can_be_named(front: Front) -> None:
    answer = post(front.port, RESPONSES, {"input": "one?"}).json
    named = {"type": "item_reference", "id": answer["output"][0]["id"]}
    body = {"input": [said("one?"), named, said("two?")]}
    reply = post(front.port, RESPONSES, body)
    assert reply.status == 200
    assert prompt_of(front) == "[user]one?\n[assistant]yes\n[user]two?\n[assistant]"
    shown = get(front.port, f"{RESPONSES}/{reply.json['id']}/input_items?order=asc").json["data"]
    assert [item["content"][0]["text"] for item in shown] == ["one?", "yes", "two?"]
    assert post(front.port, f"{RESPONSES}/input_tokens", body).json["input_tokens"] > 0
    assert post(front.port, RESPONSES, {**body, "background": True}).status == 200
    request(front.port, "DELETE", f"{RESPONSES}/{answer['id']}")
    gone = post(front.port, RESPONSES, body)
    assert (gone.status, gone.json["error"]["param"]) == (404, "input")
    assert "Send the item itself" in gone.json["error"]["message"]


@pytest.mark.parametrize("item", [{"type": "item_reference"}, {"type": "item_reference", "id": 5}])
def test_a_reference_needs_an_id(front: Front, item: dict[str, Any]) -> None:
    reply = post(front.port, RESPONSES, {"input": [said("item_reference"), item]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input[1].id")
