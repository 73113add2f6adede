"""Ollama's pull and delete, and who may use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.front_under_test import MODEL, Front, running_front, saying
from serve.wire import request

from millrace.config import replace
from millrace.errors import ModelError
from millrace.serve.ollama import library as routes
from millrace.sources import library


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front(saying("ok")) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Models on this machine, by name; downloads and deletions change only this."""
    here: dict[str, int] = {}

    def resolve(name: str, *, progress: Any, offline: bool) -> None:
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
    monkeypatch.setattr(library, "find_local", here.get)
    monkeypatch.setattr(library, "remove", remove)
    return here


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
