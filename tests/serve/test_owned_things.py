"""Stored files, batches and responses are visible only to their tenant and count against its quotas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serve.front_under_test import running_front
from serve.test_access import bearer, guarded
from serve.wire import Reply, eventually, get, post, request

from millrace.config import Config, replace
from millrace.serve.tenancy.cache_scope import SALT_HEADER
from millrace.serve.tenancy.keyring import Tenant
from millrace.serve.tenancy.owner import OWNER_HEADER, gateway_owner

pytestmark = pytest.mark.live

MODEL = "null-model"
FORM = "multipart/form-data; boundary=b"


def upload(port: int, key: str, lines: list[dict[str, Any]]) -> str:
    return upload_as(port, bearer(key), lines)


def upload_as(port: int, who: dict[str, str], lines: list[dict[str, Any]]) -> str:
    parts = [('name="purpose"', "batch"), ('name="file"; filename="a"', "".join(json.dumps(x) + "\n" for x in lines))]
    form = "".join(f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{body}\r\n" for head, body in parts)
    headers = {"Content-Type": FORM, **who}
    file_id: str = request(port, "POST", "/v1/files", (form + "--b--\r\n").encode(), headers).json["id"]
    return file_id


def line(number: int) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def test_stored_objects_have_owners(tmp_path: Path) -> None:
    with guarded(tmp_path, acme="", other="") as front:
        mine, theirs = bearer("key-acme"), bearer("key-other")
        file_id = upload(front.port, "key-acme", [line(1)])
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert post(front.port, "/v1/batches", asked, theirs).status == 404
        batch_id = post(front.port, "/v1/batches", asked, mine).json["id"]
        response_id = post(front.port, "/v1/responses", {"model": MODEL, "input": "hi"}, mine).json["id"]
        for path in (f"/v1/files/{file_id}", f"/v1/batches/{batch_id}", f"/v1/responses/{response_id}"):
            assert get(front.port, path, headers=mine).status == 200
            assert get(front.port, path, headers=theirs).status == 404
            assert get(front.port, path).status == 401
        for path in ("/v1/files", "/v1/batches"):
            assert get(front.port, path, headers=theirs).json["data"] == []
        follow = {"model": MODEL, "input": "hi", "previous_response_id": response_id}
        assert post(front.port, "/v1/responses", follow, theirs).status == 404


def test_a_gateway_names_the_owner_on_a_server_without_keys() -> None:
    """Its tenants keep their things and their prefixes apart, also where no client waits."""
    config = replace(Config(), server__port=0, server__gateway_key="between us")
    with running_front(lambda request: [104, 105], config=config) as front:

        def as_tenant(name: str, *, operator: bool = False, key: str = "between us") -> dict[str, str]:
            owner = gateway_owner(Tenant(name=name, operator=operator), b"between us")
            return {OWNER_HEADER: owner, "X-Millrace-Gateway-Key": key}

        def stored(headers: dict[str, str]) -> str:
            asked = {"model": MODEL, "input": "hi", "background": True}
            response_id: str = post(front.port, "/v1/responses", asked, headers).json["id"]
            path = f"/v1/responses/{response_id}"
            eventually(lambda: get(front.port, path, headers=headers).json["status"] == "completed")
            return path

        mine, theirs = as_tenant("Ä;operator"), as_tenant("other")
        path, other_path = stored(mine), stored(theirs)
        for headers in (theirs, as_tenant("Ä;operator", key="guess"), {}):
            assert get(front.port, path, headers=headers).status == 404
        assert get(front.port, other_path, headers=theirs).status == 200
        first, second = front.engine.received
        assert first.cache_salt != second.cache_salt
        assert (first.tenant, second.tenant) == (mine[OWNER_HEADER], theirs[OWNER_HEADER])

        post(front.port, "/v1/completions", {"model": MODEL, "prompt": "x"}, {**mine, SALT_HEADER: "of the gateway"})
        assert front.engine.received[-1].cache_salt == "of the gateway\0", "the keys that the gateway computes"


def test_a_batch_keeps_to_its_owners_quota(tmp_path: Path) -> None:
    """The tenant may run one request at a time, so its lines run one by one, and all are answered."""
    with guarded(tmp_path, acme="max_concurrent = 1") as front:
        file_id = upload(front.port, "key-acme", [line(number) for number in range(3)])
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = post(front.port, "/v1/batches", asked, bearer("key-acme")).json["id"]

        def batch() -> Any:
            return get(front.port, f"/v1/batches/{batch_id}", headers=bearer("key-acme")).json

        eventually(lambda: batch()["status"] == "completed")
        assert batch()["request_counts"]["completed"] == 3
        assert {one.tenant for one in front.engine.received} == {"acme"}


@pytest.mark.parametrize("has_keys", [True, False])
def test_work_in_the_background_runs_under_the_salt_of_its_gateway(tmp_path: Path, has_keys: bool) -> None:
    """Else tenants of the gateway would share what the replica takes for one tenant's."""
    with guarded(tmp_path, gateway="") as front:
        headers = bearer("key-gateway")
        if not has_keys:
            front.state.keyring = None
            headers = {OWNER_HEADER: gateway_owner(Tenant(name="ann"), b"")}
        salted = {**headers, SALT_HEADER: "of ann"}
        file_id = upload_as(front.port, headers, [line(1)])
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = post(front.port, "/v1/batches", asked, salted).json["id"]
        path = f"/v1/batches/{batch_id}"
        eventually(lambda: get(front.port, path, headers=headers).json["status"] == "completed")
        body = {"model": MODEL, "input": "hi", "background": True}
        for extra in ({}, {"stream": True}):
            post(front.port, "/v1/responses", {**body, **extra}, salted)
        eventually(lambda: len(front.engine.received) == 3)
        post(front.port, "/v1/completions", {"model": MODEL, "prompt": "x"}, salted)
        scopes = {one.cache_salt for one in front.engine.received}
        assert scopes == {"\0gateway\0of ann\0" if has_keys else "of ann\0"}, "that of its requests"
        post(front.port, "/v1/batches", asked, headers)
        eventually(lambda: len(front.engine.received) == 5)
        assert front.engine.received[-1].cache_salt not in scopes


def test_errors_have_the_shape_of_their_dialect(tmp_path: Path) -> None:
    with guarded(tmp_path, acme="") as front:

        def refused(path: str) -> Reply:
            reply = post(front.port, path, {"model": MODEL})
            assert reply.status == 401
            return reply

        assert refused("/v1/messages").json["error"]["type"] == "authentication_error"
        assert isinstance(refused("/api/chat").json["error"], str)
        assert refused("/v1/responses").error["code"] == "missing_api_key"
