"""Ollama's pull and delete, and who may use them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.test_access import tenants_file
from serve.wire import connected, eventually, raw_post, request

from millrace.config import replace
from millrace.errors import ModelError
from millrace.serve.model_control import FixedModels
from millrace.serve.ollama import library as routes
from millrace.serve.tenancy.keyring import Keyring
from millrace.sources import library

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("ok")) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Models on this machine, by name; downloads and deletions change only this."""
    here: dict[str, int] = {}

    def resolve(name: str, *, progress: Any, offline: bool, allow_paths: bool) -> None:
        assert not allow_paths
        if name == "org/absent":
            raise ModelError("There is no such model.")
        progress(f"downloading {name}", 0, 100)
        progress(f"downloading {name}", 100, 100)
        here[name] = 100

    def remove(name: str) -> tuple[str, int]:
        if name not in here:
            raise ModelError("It is not downloaded.")
        return name, here.pop(name)

    monkeypatch.setattr(routes, "resolve_model", resolve)
    monkeypatch.setattr(library, "find_local", lambda name: local(name) if name in here else None)
    monkeypatch.setattr(library, "remove", remove)
    return here


def local(name: str) -> library.Downloaded:
    """`alias-of-NAME` means the same files as NAME."""
    return library.Downloaded(name, 100, Path("/models") / name.removeprefix("alias-of-"), 0.0)


def lines(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


def test_pull_streams_progress_and_delete_removes(front: Front, store: dict[str, int]) -> None:
    reply = request(front.port, "POST", "/api/pull", {"model": "org/new:latest"})
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert lines(reply.body) == [
        {"status": "pulling manifest"},
        {"status": "downloading org/new", "total": 100, "completed": 0},
        {"status": "downloading org/new", "total": 100, "completed": 100},
        {"status": "success"},
    ]
    assert request(front.port, "POST", "/api/pull", {"name": "org/new", "stream": False}).json == {"status": "success"}
    assert request(front.port, "DELETE", "/api/delete", {"model": "org/new"}).status == 200
    assert store == {}
    assert request(front.port, "DELETE", "/api/delete", {"model": "org/new"}).status == 404


def test_errors(front: Front, store: dict[str, int]) -> None:
    assert "no such model" in lines(request(front.port, "POST", "/api/pull", {"model": "org/absent"}).body)[-1]["error"]
    whole = request(front.port, "POST", "/api/pull", {"model": "org/absent", "stream": False})
    assert whole.status == 404
    assert request(front.port, "POST", "/api/pull", {}).status == 400
    assert request(front.port, "POST", "/api/pull", {"model": "/etc/passwd"}).status == 400
    assert request(front.port, "DELETE", "/api/delete", {"model": MODEL}).status == 409


def test_only_local_programs_may_manage_models(
    front: Front, store: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for change, expected in (({"server__manage_models": "never"}, 403), ({"server__host": "0.0.0.0"}, 403)):
        monkeypatch.setattr(front.state, "config", replace(front.state.config, **change))
        assert request(front.port, "DELETE", "/api/delete", {"model": "org/new"}).status == expected
        assert request(front.port, "POST", "/api/pull", {"model": MODEL}).status == 200  # Changes nothing.
    monkeypatch.setattr(front.state, "config", replace(front.state.config, server__manage_models="always"))
    assert request(front.port, "POST", "/api/pull", {"model": "org/new"}).status == 200


def test_pages_of_other_names_and_forwarded_requests_are_not_local(front: Front, store: dict[str, int]) -> None:
    for headers in ({"Host": f"rebound.example:{front.port}"}, {"X-Forwarded-For": "192.0.2.7"}):
        assert request(front.port, "POST", "/api/pull", {"model": "org/new"}, headers).status == 403
    assert request(front.port, "POST", "/api/pull", {"model": "org/new"}, {"Host": "localhost:1"}).status == 200


def test_a_served_model_is_not_deleted_under_another_name(
    front: Front, store: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.update({"org/served": 1, "alias-of-org/served": 1})
    monkeypatch.setattr(next(iter(front.state.models)), "source", "org/served")
    assert request(front.port, "DELETE", "/api/delete", {"model": "alias-of-org/served"}).status == 409
    assert "alias-of-org/served" in store


def test_an_operators_key_manages_models_and_another_does_not(
    front: Front, store: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tenants_file(tmp_path / "keys.toml", boss="operator = true", acme="")
    monkeypatch.setattr(front.state, "keyring", Keyring(keys))
    monkeypatch.setattr(front.state, "config", replace(front.state.config, server__host="0.0.0.0"))
    orders: list[tuple[str, float]] = []

    class Control(FixedModels):
        async def keep_alive(self, name: str, seconds: float) -> None:
            orders.append((name, seconds))

    monkeypatch.setattr(front.state, "control", Control())
    for tenant, expected in (("acme", 403), ("boss", 200)):
        key = {"Authorization": f"Bearer key-{tenant}"}
        assert request(front.port, "POST", "/api/pull", {"model": "org/new"}, key).status == expected
        body = {"model": MODEL, "keep_alive": 0}
        assert request(front.port, "POST", "/api/generate", body, key).status == expected
    assert orders == [(MODEL, 0.0)]
    assert request(front.port, "POST", f"/v1/models/{MODEL}/unload", {}, {"x-api-key": "key-acme"}).status == 403


def test_downloads_are_limited_and_end_when_the_client_goes(
    front: Front, store: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    release = threading.Event()

    def resolve(name: str, *, progress: Any, offline: bool, allow_paths: bool) -> None:
        try:
            for done in range(100_000):
                progress(f"part {done}", done, 100_000)
                if release.wait(0.005):
                    return
        except ConnectionAbortedError:
            ended.append(name)
            raise

    monkeypatch.setattr(routes, "resolve_model", resolve)
    with ExitStack() as stack:
        for number in range(routes.MAX_PULLS):
            sock = stack.enter_context(connected(front.port))
            sock.sendall(raw_post("/api/pull", {"model": f"org/m{number}"}))
        eventually(lambda: len(front.state.pulls) == routes.MAX_PULLS)
        assert request(front.port, "POST", "/api/pull", {"model": "org/more"}).status == 429
    eventually(lambda: len(ended) == routes.MAX_PULLS)
    eventually(lambda: not front.state.pulls)
