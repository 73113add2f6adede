"""/v1/responses with the stock `openai` client: create, stream, continue, retrieve, cancel, delete."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import eventually, get, post, request

from millrace.config import Config, replace
from millrace.link.messages import unpack_tokens

pytestmark = pytest.mark.live

TEXT = 'Grüße, "world" 🌍\nbye'
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying(TEXT), max_context=512) as running:
        yield running


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def prompt_of(front: Front) -> str:
    return bytes(unpack_tokens(front.engine.received[-1].prompt).tolist()).decode()


def test_create(client: openai.OpenAI, front: Front) -> None:
    response = client.responses.create(
        model=MODEL, input="hi", instructions="Be kind.", temperature=0, metadata={"a": "b"}, max_output_tokens=100
    )
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == len(TEXT.encode()) + 1
    assert prompt_of(front) == "[system]Be kind.\n[user]hi\n[assistant]"


def test_an_answer_cut_at_max_output_tokens_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_typed_events(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT


def test_the_stream_is_the_whole_answer_and_is_stored(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="hi")
    with client.responses.stream(model=MODEL, input="hi") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == whole.output_text == TEXT
    assert final.usage == whole.usage
    assert client.responses.retrieve(final.id).output_text == TEXT


def test_logprobs(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "hi", "top_logprobs": 2}
    response = client.responses.create(**fields, include=["message.output_text.logprobs"])
    entries = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert entries is not None
    assert len(entries) == len(TEXT.encode())
    assert len(entries[0].top_logprobs) == 2


def test_a_conversation_is_continued(client: openai.OpenAI, front: Front) -> None:
    first = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    )
    second = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "three"}]}],
        previous_response_id=first.id,
        instructions="New.",
    )
    said = f"[user]one\n[assistant]two\n[assistant]{TEXT}\n"
    assert prompt_of(front) == f"[system]New.\n{said}[user]three\n[assistant]"
    client.responses.create(model=MODEL, input="four", previous_response_id=second.id, store=False)
    assert prompt_of(front) == f"{said}[user]three\n[assistant]{TEXT}\n[user]four\n[assistant]"
    items = client.responses.input_items.list(first.id, order="asc")
    assert [item.content[0].text for item in items.data] == ["one", "two"]  # type: ignore[union-attr]


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi")
    assert client.responses.retrieve(response.id).output_text == TEXT
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="hi", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


def test_an_unstored_response_is_not_found(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_background(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hi", background=True)
    assert response.status == "queued"
    eventually(lambda: client.responses.retrieve(response.id).status == "completed")
    done = client.responses.retrieve(response.id)
    assert done.output_text == TEXT
    assert done.created_at == response.created_at
    follow = client.responses.create(input="more", previous_response_id=response.id)
    assert follow.model == MODEL
    with pytest.raises(openai.ConflictError):
        client.responses.cancel(response.id)


def test_a_background_response_can_be_cancelled() -> None:
    with (
        running_front(endless, step_s=0.01, max_context=100_000, kv_tokens=200_000) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client,
    ):
        response = client.responses.create(model=MODEL, input="hi", background=True)
        eventually(lambda: client.responses.retrieve(response.id).status == "in_progress")
        eventually(lambda: front.call(lambda: len(front.engine.rows)) == 1)
        assert client.responses.cancel(response.id).status == "cancelled"
        eventually(lambda: front.call(lambda: len(front.engine.rows)) == 0)
        assert client.responses.retrieve(response.id).status == "cancelled"


def test_a_background_response_survives_a_restart(tmp_path: Path) -> None:
    config = replace(Config(), server__port=0, server__drain_timeout_s=0.1, server__data_dir=str(tmp_path))
    with running_front(endless, step_s=0.01, config=config) as front:
        asked = {"model": MODEL, "input": "hi", "background": True, "max_output_tokens": 4000}
        response_id = post(front.port, RESPONSES, asked).json["id"]
        eventually(lambda: front.call(lambda: len(front.engine.rows)) == 1)
    with running_front(saying(TEXT), config=config) as front:
        eventually(lambda: get(front.port, f"{RESPONSES}/{response_id}").json["status"] == "completed")


def test_old_responses_are_deleted(tmp_path: Path) -> None:
    config = replace(Config(), server__port=0, server__data_dir=str(tmp_path))
    with running_front(saying(TEXT), config=config) as front:
        old, new = (post(front.port, RESPONSES, {"model": MODEL, "input": "hi"}).json["id"] for _ in range(2))
    with sqlite3.connect(tmp_path / "store.sqlite3") as database:
        database.execute("UPDATE responses SET created_at = created_at - 31 * 86400 WHERE id = ?", (old,))
    with running_front(saying(TEXT), config=config) as front:
        eventually(lambda: get(front.port, f"{RESPONSES}/{old}").status == 404)
        assert get(front.port, f"{RESPONSES}/{new}").status == 200


def test_input_tokens(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="hi")
    assert counted.input_tokens == len("[user]hi\n[assistant]")


def test_an_error_inside_a_stream_is_raised() -> None:
    with (
        running_front(endless, step_s=0.01) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = client.responses.create(model=MODEL, input="hi", stream=True)
        next(iter(stream))
        front.call(lambda: front.engine.die("The engine is gone."))
        with pytest.raises(openai.APIError, match="gone"):
            list(stream)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content"),
        ({"input": [{"role": "user", "contents": "x", "content": "x"}]}, 400, "input[0].contents"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0].type"),
        ({"max_output_tokens": 10**9}, 400, "max_output_tokens"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "gpt-5"}, 404, "model"),
        ({"tools": [{"type": "web_surf"}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, 400, "tool_choice.type"),
        ({"reasoning": {"effort": "low"}}, 400, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": []}}}, 400, "text.format"),
        ({"truncation": "some"}, 400, "truncation"),
        ({"conversation": "conv_1"}, 404, "conversation"),
        ({"include": ["file_search_call.results"]}, 400, "include"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"background": True, "store": False}, 400, "store"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"max_output_token": 5}, 400, "max_output_token"),
        ({"input": "x" * 600}, 400, "input"),
    ],
)
def test_errors(front: Front, fields: dict[str, Any], status: int, param: str) -> None:
    reply = post(front.port, RESPONSES, {"model": MODEL, "input": "hi", **fields})
    assert reply.status == status, reply.body
    assert reply.error["param"] == param


def test_a_count_names_the_field_that_is_wrong(front: Front) -> None:
    only_reasoning = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}]
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        assert post(front.port, path, {"input": only_reasoning}).error["param"] == "input"


def test_retrieve_refuses_unsupported_queries(front: Front) -> None:
    response_id = post(front.port, RESPONSES, {"model": MODEL, "input": "hi"}).json["id"]
    assert get(front.port, f"{RESPONSES}/{response_id}?stream=true").error["param"] == "stream"
    assert get(front.port, f"{RESPONSES}/{response_id}?straem=true").error["code"] == "unknown_field"
    assert json.loads(request(front.port, "DELETE", f"{RESPONSES}/{response_id}").body)["deleted"] is True
