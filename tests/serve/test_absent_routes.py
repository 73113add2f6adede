"""Endpoints that this server does not have answer 501."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve.front_under_test import MODEL, Front, running_front
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


@pytest.mark.parametrize(
    ("path", "subject"),
    [
        ("/v1/rerank", "Reranking"),
        ("/rerank", "Reranking"),
        ("/v2/rerank", "Reranking"),
        ("/v1/score", "Scoring"),
        ("/score", "Scoring"),
        ("/v1/classify", "Classification"),
        ("/classify", "Classification"),
    ],
)
def test_ranking_is_planned_and_embeddings_are_there(front: Front, path: str, subject: str) -> None:
    reply = request(front.port, "POST", path, {"model": MODEL, "query": "a", "documents": ["b"]})
    assert (reply.status, reply.error["code"]) == (501, "not_implemented")
    message = reply.error["message"]
    assert message.startswith(subject)
    assert "planned" in message
    assert "POST /v1/embeddings" in message
    assert request(front.port, "POST", "/v1/embeddings", {"model": MODEL, "input": "b"}).status == 200


def test_unknown_paths_stay_404(front: Front) -> None:
    assert request(front.port, "POST", "/v1/moderation", {}).error["code"] == "not_found"
