"""Endpoints that this server does not have answer 501."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve.front_under_test import Front, running_front
from serve.wire import request

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front() as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/moderations"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/images/generations"),
        ("GET", "/v1/vector_stores/vs_1"),
        ("POST", "/v1/fine_tuning/jobs"),
    ],
)
def test_known_and_absent(front: Front, method: str, path: str) -> None:
    reply = request(front.port, method, path, {} if method == "POST" else None)
    assert reply.status == 501
    assert reply.error["code"] == "not_implemented"


def test_unknown_paths_stay_404(front: Front) -> None:
    assert request(front.port, "POST", "/v1/moderation", {}).error["code"] == "not_found"
