"""Vectors from the real server with the default model, through the stock clients and plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import ollama
import openai
import pytest
from contract.real_server import RealServer, real_server
from contract.schema_check import DOCUMENT, problems, schemas
from serve.front_under_test import running_front
from serve.wire import eventually, post

from millrace.serve.generate.vectors import NOT_TRAINED
from millrace.sources.resolve import resolve_model
from millrace.text.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.live

MODEL = "smollm2-135m-instruct"
OPTIONS = ("--dtype", "float32", "--kv-tokens", "4096", "--max-context", "128")
TEXTS = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Interest rates rose by a quarter of a point."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(*OPTIONS, "--data-dir", str(tmp_path_factory.mktemp("data"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_each_input_has_a_vector_of_length_one(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    vectors = np.array([one.embedding for one in answer.data])
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1.0] * 3, abs=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 15


def test_all_forms_of_input_give_the_same_vectors(client: openai.OpenAI) -> None:
    """The client asks for base64 unless told otherwise."""
    ids = [load_tokenizer(resolve_model(MODEL)).encode(text) for text in TEXTS]
    expected = [one.embedding for one in client.embeddings.create(model=MODEL, input=TEXTS).data]
    assert [one.embedding for one in client.embeddings.create(model=MODEL, input=ids).data] == expected
    for given in (TEXTS[1], ids[1]):
        [one] = client.embeddings.create(model=MODEL, input=given, encoding_format="float").data
        assert one.embedding == pytest.approx(expected[1], abs=1e-6)


def test_fewer_dimensions_and_other_pooling(client: openai.OpenAI) -> None:
    def vector(**options: object) -> np.ndarray:
        return np.array(client.embeddings.create(model=MODEL, input=TEXTS[0], **options).data[0].embedding)

    whole, mean = vector(), vector(extra_body={"pooling": "mean"})
    assert vector(dimensions=16) == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-5)
    assert len(mean) == len(whole)
    assert abs(float(mean @ whole)) < 0.99


def test_many_inputs_beside_a_generation(client: openai.OpenAI) -> None:
    numbers = [f"number {value}" for value in range(40)]
    with client.completions.create(model=MODEL, prompt="Once", max_tokens=20, stream=True) as stream:
        answer = client.embeddings.create(model=MODEL, input=numbers)
        assert sum(1 for _ in stream) > 1
    assert len(answer.data) == 40
    alone = client.embeddings.create(model=MODEL, input=numbers[7]).data[0].embedding
    assert answer.data[7].embedding == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "input", "input"),
        ({"input": []}, "input", "empty array"),
        ({"input": [""]}, "input", "no tokens"),
        ({"input": "x", "dimensions": 100_000}, "dimensions", "100000"),
        ({"input": "x", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "x", "pooling": "max"}, "pooling", "max"),
        ({"input": ["x"] * 2049}, "input", "2048"),
        ({"input": [[1]] * 2049}, "input", "2048"),
        ({"input": "word " * 500}, "input", "context"),
        ({"input": "word " * 100_000}, "input", "context"),
        ({"input": [10**6]}, "input", "1000000"),
        ({"input": "x", "stream": True}, "stream", "stream"),
    ],
)
def test_wrong_requests_name_their_field(server: RealServer, body: dict[str, object], param: str, part: str) -> None:
    reply = post(server.port, "/v1/embeddings", {"model": MODEL, **body})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert part in reply.error["message"]
    assert "max_tokens" not in reply.error["message"]


@pytest.mark.skipif(not DOCUMENT.exists(), reason=f"{DOCUMENT} is missing")
def test_answers_match_openais_schema(server: RealServer) -> None:
    reply = post(server.port, "/v1/embeddings", {"model": MODEL, "input": "x"})
    defs = schemas()
    assert not problems(reply.json, defs["CreateEmbeddingResponse"], defs)


def test_ollamas_client(server: RealServer, client: openai.OpenAI) -> None:
    own = ollama.Client(host=server.url)
    expected = [one.embedding for one in client.embeddings.create(model=MODEL, input=TEXTS).data]
    several = own.embed(model=MODEL, input=TEXTS)
    assert np.array(several.embeddings) == pytest.approx(np.array(expected), abs=1e-5)
    assert several.prompt_eval_count > 15
    assert several.total_duration > 0
    assert own.embeddings(model=MODEL, prompt=TEXTS[1]).embedding == pytest.approx(expected[1], abs=1e-5)
    assert own.embed(model=MODEL, input="").embeddings == []
    assert len(own.embed(model=MODEL, input=TEXTS[0], dimensions=8).embeddings[0]) == 8


def test_ollama_cuts_long_inputs_only_when_told(server: RealServer) -> None:
    body = {"model": MODEL, "input": "word " * 500}
    reply = post(server.port, "/api/embed", body)
    assert reply.status == 400
    assert "tokens" in reply.json["error"]
    assert post(server.port, "/api/embeddings", {"model": MODEL, "prompt": body["input"]}).status == 400
    cut = post(server.port, "/api/embed", {**body, "truncate": True}).json
    assert cut["prompt_eval_count"] == 128
    assert cut["truncated_input_tokens"] > 300
    assert np.linalg.norm(cut["embeddings"][0]) == pytest.approx(1.0, abs=1e-5)


def test_a_batch_may_ask_for_embeddings(client: openai.OpenAI) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": text}}
        for number, text in enumerate(TEXTS)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"))
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    written = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in written) == ["0", "1", "2"]
    assert all(len(one["response"]["body"]["data"][0]["embedding"]) > 100 for one in written)


def test_a_chat_model_says_that_it_was_not_trained_for_embeddings(server: RealServer) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/api/embed", {"input": "x"}),
        ("/api/embeddings", {"prompt": "x"}),
    ):
        reply = post(server.port, path, {"model": MODEL, **body})
        assert (reply.status, reply.headers["x-millrace-warning"]) == (200, NOT_TRAINED), path
    answered = post(server.port, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1})
    assert "x-millrace-warning" not in answered.headers


def test_a_model_for_embeddings_has_no_warning() -> None:
    with running_front() as front:
        front.state.is_embedder = True
        reply = post(front.port, "/v1/embeddings", {"input": "x"})
        assert (reply.status, "x-millrace-warning" in reply.headers) == (200, False)
