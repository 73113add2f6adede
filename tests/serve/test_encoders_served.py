"""An embedder, a reranker, a classifier and a model for text behind one port."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.served import Served, serving
from helpers.tiny_encoders import make_model, save_encoder, write_modules
from helpers.tiny_retrieval import save_colbert, save_splade
from helpers.tiny_server import tiny_source
from tokenizers import Tokenizer

pytestmark = pytest.mark.live

LONG = "sea " * 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_modules(save_encoder(root / "embedder"), "Pooling", "Normalize", prompts={"query": "what is "})
    save_encoder(root / "reranker", "bert", "ForSequenceClassification", num_labels=1)
    save_encoder(root / "classifier", "modernbert", "ForSequenceClassification", num_labels=3)
    save_encoder(root / "tagger", "distilbert", "ForTokenClassification", num_labels=3)
    save_splade(root / "sparse")
    save_colbert(root / "colbert", is_pylate=True, query_length=8)
    (root / "writer").mkdir()
    return root


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    sources = [str(folder / name) for name in ("embedder", "reranker", "classifier", "tagger", "sparse", "colbert")]
    with serving(*sources, tiny_source(folder / "writer"), "--data-dir", str(folder / "data")) as server:
        yield server


def post(served: Served, path: str, **body: Any) -> Any:
    status, answer = served.request("POST", path, body)
    assert status == 200, answer
    return answer


def refused(served: Served, path: str, **body: Any) -> dict[str, Any]:
    status, answer = served.request("POST", path, body)
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


def encoded(folder: Path, name: str, *texts: str) -> Any:
    tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
    return tokenizer.encode(*texts)


def embedding(folder: Path, text: str) -> np.ndarray:
    states = make_model("bert")(torch.tensor([encoded(folder, "embedder", text).ids])).last_hidden_state[0]
    mean = states.mean(0).numpy()
    vector: np.ndarray = mean / np.linalg.norm(mean)
    return vector


def pair_score(folder: Path, first: str, second: str) -> float:
    both = encoded(folder, "reranker", first, second)
    model = make_model("bert", "ForSequenceClassification", num_labels=1)
    logit = model(torch.tensor([both.ids]), token_type_ids=torch.tensor([both.type_ids])).logits[0, 0]
    return float(torch.sigmoid(logit))


def test_embeddings_are_those_of_the_model(served: Served, folder: Path) -> None:
    texts = ["the sea is blue", "a dog runs far away"]
    answer = post(served, "/v1/embeddings", model="embedder", input=texts)
    for data, text in zip(answer["data"], texts, strict=True):
        np.testing.assert_allclose(data["embedding"], embedding(folder, text), atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(encoded(folder, "embedder", text).ids) for text in texts)
    [data] = post(served, "/v1/embeddings", model="embedder", input=texts[0], encoding_format="base64")["data"]
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(data["embedding"]), "<f4"), embedding(folder, texts[0]), atol=1e-5
    )
    [data] = post(served, "/v1/embeddings", model="embedder", input=texts[0], dimensions=8)["data"]
    shorter = embedding(folder, texts[0])[:8]
    np.testing.assert_allclose(data["embedding"], shorter / np.linalg.norm(shorter), atol=1e-5)
    [vector] = post(served, "/api/embed", model="embedder", input=texts[0])["embeddings"]
    np.testing.assert_allclose(vector, embedding(folder, texts[0]), atol=1e-5)


def test_embeddings_in_coheres_form(served: Served, folder: Path) -> None:
    texts = ["the sea is blue", "a dog runs"]
    answer = post(served, "/v1/embed", model="embedder", texts=texts)
    assert (answer["response_type"], answer["texts"]) == ("embeddings_floats", texts)
    for vector, text in zip(answer["embeddings"], texts, strict=True):
        np.testing.assert_allclose(vector, embedding(folder, text), atol=1e-5)
    types = ["float", "base64", "binary", "ubinary"]
    answer = post(
        *(served, "/v2/embed"), model="embedder", texts=["the sea"], input_type="search_query", embedding_types=types
    )
    [vector], expected = answer["embeddings"]["float"], embedding(folder, "what is the sea")
    np.testing.assert_allclose(vector, expected, atol=1e-5)
    [coded] = answer["embeddings"]["base64"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), expected, atol=1e-5)
    [bits], [signed] = answer["embeddings"]["ubinary"], answer["embeddings"]["binary"]
    assert bits == np.packbits(expected > 0).tolist() == [number + 128 for number in signed]
    answer = post(served, "/v2/embed", model="embedder", texts=["sea"], input_type="search_document")
    np.testing.assert_allclose(answer["embeddings"]["float"][0], embedding(folder, "sea"), atol=1e-5)
    assert answer["meta"]["tokens"]["input_tokens"] == answer["meta"]["billed_units"]["input_tokens"] == 3
    assert refused(served, "/v2/embed", model="embedder", texts=[LONG])["param"] == "texts"
    post(served, "/v2/embed", model="embedder", texts=[LONG], truncate="END", output_dimension=8)


def test_a_prompt_of_the_model_goes_before_the_text(served: Served, folder: Path) -> None:
    [data] = post(served, "/v1/embeddings", model="embedder", input="the sea", prompt_name="query")["data"]
    np.testing.assert_allclose(data["embedding"], embedding(folder, "what is the sea"), atol=1e-5)
    error = refused(served, "/v1/embeddings", model="embedder", input="the sea", prompt_name="document")
    assert error["param"] == "prompt_name"
    assert "'query'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_the_cross_encoder(path: str, served: Served, folder: Path) -> None:
    documents = ["the sea is blue", "cat runs", "a red fish swims in water"]
    answer = post(served, path, model="reranker", query="what colour has the sea", documents=documents)
    scores = [pair_score(folder, "what colour has the sea", document) for document in documents]
    assert [result["index"] for result in answer["results"]] == np.argsort(scores)[::-1].tolist()
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    np.testing.assert_allclose([found[index] for index in range(3)], scores, atol=1e-5)
    assert "document" not in answer["results"][0]
    answer = post(
        served,
        path,
        model="reranker",
        query="what colour has the sea",
        documents=[{"text": text} for text in documents],
        top_n=1,
        return_documents=True,
    )
    [best] = answer["results"]
    assert best["document"] == {"text": documents[int(np.argmax(scores))]}


def test_an_embedder_ranks_by_cosine(served: Served, folder: Path) -> None:
    answer = post(served, "/v1/score", model="embedder", text_1="the sea", text_2=["the moon", "a cat"])
    query = embedding(folder, "what is the sea")
    expected = [float(query @ embedding(folder, text)) for text in ("the moon", "a cat")]
    np.testing.assert_allclose([data["score"] for data in answer["data"]], expected, atol=1e-5)


def test_scores_of_pairs(served: Served, folder: Path) -> None:
    firsts, seconds = ["the sea", "a dog"], ["is blue", "runs"]
    answer = post(served, "/v1/score", model="reranker", text_1=firsts, text_2=seconds)
    expected = [pair_score(folder, *pair) for pair in zip(firsts, seconds, strict=True)]
    np.testing.assert_allclose([data["score"] for data in answer["data"]], expected, atol=1e-5)
    error = refused(served, "/v1/score", model="reranker", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert (error["param"], "2" in error["message"], "3" in error["message"]) == ("text_1", True, True)


def test_texts_and_tokens_are_classified(served: Served, folder: Path) -> None:
    [data] = post(served, "/v1/classify", model="classifier", input="the sea is blue")["data"]
    ids = torch.tensor([encoded(folder, "classifier", "the sea is blue").ids])
    model = make_model("modernbert", "ForSequenceClassification", num_labels=3)
    expected = torch.softmax(model(ids).logits[0], -1)
    np.testing.assert_allclose(data["probs"], expected.numpy(), atol=1e-5)
    assert data["label"] == f"LABEL_{int(expected.argmax())}"
    [data] = post(served, "/v1/classify", model="tagger", input="the sea")["data"]
    logits = make_model("distilbert", "ForTokenClassification", num_labels=3)(ids[:, [0, 1, 2, 5]]).logits[0]
    expected = torch.softmax(logits, -1)
    assert [token["label"] for token in data["tokens"]] == [f"LABEL_{index}" for index in expected.argmax(-1).tolist()]
    np.testing.assert_allclose([token["score"] for token in data["tokens"]], expected.amax(-1).numpy(), atol=1e-5)


def test_long_texts_are_refused_with_the_limit_unless_they_may_be_cut(served: Served, folder: Path) -> None:
    error = refused(served, "/v1/embeddings", model="embedder", input=["the sea", LONG])
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "102" in error["message"]
    assert "64" in error["message"]
    [data] = post(served, "/v1/embeddings", model="embedder", input=LONG, truncate=True)["data"]
    np.testing.assert_allclose(data["embedding"], embedding(folder, "sea " * 62), atol=1e-5)
    error = refused(served, "/v1/rerank", model="reranker", query="the sea", documents=["blue", LONG])
    assert error["param"] == "documents"
    answer = post(served, "/v1/rerank", model="reranker", query="the sea", documents=[LONG], max_tokens_per_doc=5)
    expected = pair_score(folder, "the sea", "sea " * 5)
    assert answer["results"][0]["relevance_score"] == pytest.approx(expected, abs=1e-5)
    answer = post(served, "/v1/rerank", model="reranker", query="the sea", documents=[LONG], truncate=True)
    assert answer["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"model": "embedder", "messages": [{"role": "user", "content": "hi"}]}, "/v1/embed"),
        ("/v1/completions", {"model": "classifier", "prompt": "hi"}, "/v1/classify"),
        ("/v1/embeddings", {"model": "reranker", "input": "hi"}, "/v1/rerank"),
        ("/v1/classify", {"model": "embedder", "input": "hi"}, "not trained to classify"),
        ("/v1/rerank", {"model": "classifier", "query": "a", "documents": ["b"]}, "3 classes"),
        ("/v1/rerank", {"model": "random-writer", "query": "a", "documents": ["b"]}, "writes text"),
    ],
)
def test_what_a_model_was_not_made_for_is_refused(served: Served, path: str, body: Any, named: str) -> None:
    error = refused(served, path, **body)
    assert (error["param"], error["code"]) == ("model", "unsupported_model")
    assert named in error["message"]


def test_a_model_for_text_answers_beside_them(served: Served) -> None:
    answer = post(served, "/v1/completions", model="random-writer", prompt="the sea", max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


def test_requests_are_counted_and_explained(served: Served) -> None:
    status, _ = served.request(
        "POST", "/v1/embeddings", {"model": "embedder", "input": ["sea", "sky"]}, {"X-Request-Id": "counted"}
    )
    assert status == 200
    status, explained = served.request("GET", "/v1/requests/counted/explain")
    assert status == 200
    assert [one["finish_reason"] for one in explained["sequences"]] == ["stop", "stop"]
    assert "no prefix cache" in explained["sequences"][0]["cache"]["why"]
    assert served.metric('millrace_request_prompt_tokens_total{model="embedder"}') > 0
    assert served.metric('millrace_engine_steps_total{model="embedder"}') >= 1


def test_the_openapi_document_has_every_path(served: Served) -> None:
    _, document = served.request("GET", "/openapi.json")
    embeds, ranks = ("/v1/embed", "/v2/embed"), ("/v1/rerank", "/v2/rerank", "/rerank")
    for path in (*embeds, *ranks, "/v1/score", "/score", "/v1/classify", "/classify"):
        assert "requestBody" in document["paths"][path]["post"], path
        assert document["paths"][path]["post"]["responses"]["200"]


def test_sparse_weights_of_tokens(served: Served, folder: Path) -> None:
    answer = post(served, "/v1/sparse-vector", model="sparse", input=["the sea", "fish"], return_tokens=True)
    logits = make_model("bert", "ForMaskedLM")(torch.tensor([encoded(folder, "sparse", "the sea").ids])).logits[0]
    expected = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
    first = answer["data"][0]
    np.testing.assert_allclose(first["values"], expected[first["indices"]], atol=1e-4)
    assert len(first["tokens"]) == len(first["indices"]) == int((expected > 0).sum())
    [one] = post(served, "/v1/sparse-vector", model="sparse", input="the sea", max_weights=1)["data"]
    assert one["indices"] == [int(expected.argmax())]
    scores = post(served, "/v1/score", model="sparse", text_1="the sea", text_2=["the sea"])["data"]
    assert scores[0]["score"] == pytest.approx(float((expected**2).sum()), rel=1e-4)
    message = refused(served, "/v1/embeddings", model="sparse", input="the sea")["message"]
    assert "SPLADE" in message
    assert "/v1/sparse-vector" in message


def test_vectors_of_tokens_and_their_order_of_documents(served: Served) -> None:
    def vectors(role: str, *texts: str) -> list[np.ndarray]:
        answer = post(served, "/v1/multi-vector", model="colbert", input=list(texts), input_type=role)
        return [np.array(one["embeddings"], np.float32) for one in answer["data"]]

    [query], documents = vectors("query", "the sea"), ["a red fish", "the moon a sun", "blue"]
    assert query.shape == (8, 16)
    scores = [float((query @ one.T).max(axis=1).sum()) for one in vectors("document", *documents)]
    ranked = post(served, "/v1/rerank", model="colbert", query="the sea", documents=documents)["results"]
    assert [one["index"] for one in ranked] == np.argsort(scores)[::-1].tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in ranked], sorted(scores, reverse=True), atol=1e-4)
    packed = post(served, "/v1/multi-vector", model="colbert", input="blue", embedding_type="base64")["data"][0]
    rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in packed["embeddings"]]
    np.testing.assert_allclose(rows, vectors("document", "blue")[0], atol=1e-6)
    assert (
        "queries of at most 8"
        in refused(served, "/v1/rerank", model="colbert", query="sea " * 9, documents=["blue"])["message"]
    )
    assert "/v1/multi-vector" in refused(served, "/v1/embeddings", model="colbert", input="the sea")["message"]
    assert "one vector per text" in refused(served, "/v1/multi-vector", model="embedder", input="sea")["message"]
    assert "writes text" in refused(served, "/v1/sparse-vector", model="random-writer", input="sea")["message"]
