"""Responses, files and batches conform to OpenAI's own schemas, if the document is available."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from contract.schema_check import DOCUMENT, problems, schemas
from serve.front_under_test import MODEL, Front, endless, running_front, saying
from serve.wire import Reply, eventually, get, post, request

from millrace.link.messages import NewRequest

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not DOCUMENT.exists(), reason="OpenAI's OpenAPI document is missing"),
]

RESPONSES = "/v1/responses"
LOGPROBS = ["message.output_text.logprobs"]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"instructions": "Be kind.", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "temperature": 0.5},
    {"max_output_tokens": 2, "top_p": 0.5, "prompt_cache_key": "k", "store": False},
    {"include": LOGPROBS, "top_logprobs": 3},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], "background": True},
]


def conforms(value: Any, name: str) -> None:
    assert problems(value, {"$ref": name}, schemas()) == []


def typed_events(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    found = []
    for frame in reply.body.decode().split("\n\n")[:-1]:
        head, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    return found


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("Tide and 時 🌊"), max_context=256) as running:
        yield running


@pytest.mark.parametrize("fields", VARIANTS)
def test_responses(front: Front, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": "hi", **fields}
    answer = post(front.port, RESPONSES, body).json
    conforms(answer, "Response")
    if answer["store"]:
        eventually(lambda: get(front.port, f"{RESPONSES}/{answer['id']}").json["status"] != "queued")
        conforms(get(front.port, f"{RESPONSES}/{answer['id']}").json, "Response")
        items = get(front.port, f"{RESPONSES}/{answer['id']}/input_items").json
        conforms(items, "ResponseItemList")
    if not fields.get("background"):
        streamed = typed_events(post(front.port, RESPONSES, {**body, "stream": True}))
        for event in streamed:
            conforms(event, "ResponseStreamEvent")
        final = streamed[-1]["response"]
        assert final["output"][0]["content"] == answer["output"][0]["content"]


def test_events_of_a_failure() -> None:
    def dying(request: NewRequest) -> Iterator[int]:
        yield from b"abc"
        front.loop.call_soon(front.engine.die, "The engine is gone.")
        yield from endless(request)

    with running_front(dying, step_s=0.01) as front:
        found = typed_events(post(front.port, RESPONSES, {"model": MODEL, "input": "hi", "stream": True}))
        assert [event["type"] for event in found[-2:]] == ["response.failed", "error"]
        for event in found:
            conforms(event, "ResponseStreamEvent")


def test_every_parameter_of_the_reference_is_known(front: Front) -> None:
    def properties(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return properties(schemas()[schema["$ref"].rsplit("/", 1)[-1]])
        found = set(schema.get("properties", ()))
        for part in schema.get("allOf", ()):
            found |= properties(part)
        return found

    for name, path in (("CreateResponse", RESPONSES), ("CreateBatchRequest", "/v1/batches")):
        for field in sorted(properties(schemas()[name])):
            base = {"model": MODEL, "input": "hi"} if path == RESPONSES else {}
            error = post(front.port, path, {**base, field: [{"surely": "wrong"}]}).error
            assert error["code"] != "unknown_field" or error["param"] != field, error
            if path == RESPONSES:
                assert (error["param"] or "").startswith(field), error


def test_files_and_batches(front: Front) -> None:
    line = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": {"model": MODEL, "input": "hi"}}
    parts = [('name="purpose"', "batch"), ('name="file"; filename="a.jsonl"', json.dumps(line) + "\n")]
    form = "".join(f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{body}\r\n" for head, body in parts)
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file = request(front.port, "POST", "/v1/files", (form + "--b--\r\n").encode(), headers).json
    conforms(file, "OpenAIFile")
    asked = {"input_file_id": file["id"], "endpoint": RESPONSES, "completion_window": "24h"}
    batch = post(front.port, "/v1/batches", asked).json
    conforms(batch, "Batch")
    eventually(lambda: get(front.port, f"/v1/batches/{batch['id']}").json["status"] == "completed")
    conforms(get(front.port, f"/v1/batches/{batch['id']}").json, "Batch")
    conforms(get(front.port, "/v1/batches").json, "ListBatchesResponse")
    conforms(get(front.port, "/v1/files").json, "ListFilesResponse")
    conforms(request(front.port, "DELETE", f"/v1/files/{file['id']}").json, "DeleteFileResponse")
