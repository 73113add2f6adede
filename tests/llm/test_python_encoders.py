"""Encoders from Python: vectors, scores of pairs, orders, classes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_encoders import make_model, save_encoder, write_modules
from helpers.tiny_retrieval import save_colbert, save_splade
from tokenizers import Tokenizer

from millrace import LLM
from millrace.errors import BadRequest, ContextOverflow
from millrace.llm.async_llm import AsyncLLM

pytestmark = pytest.mark.live


def opened(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", threads=1, progress=False)


def encoded(folder: Path, *texts: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*texts)
    return torch.tensor([found.ids]), torch.tensor([found.type_ids])


def mean_vector(folder: Path, text: str) -> np.ndarray:
    mean = make_model("bert")(encoded(folder, text)[0]).last_hidden_state[0].mean(0).numpy()
    vector: np.ndarray = mean / np.linalg.norm(mean)
    return vector


def test_an_embedder(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    write_modules(folder, "Pooling", "Normalize", prompts={"query": "what is "})
    with opened(folder) as llm:
        vectors = llm.embed(["the sea", "a red fish"])
        np.testing.assert_allclose(vectors[1], mean_vector(folder, "a red fish"), atol=1e-5)
        [prompted] = llm.embed("the sea", prompt_name="query")
        query = mean_vector(folder, "what is the sea")
        np.testing.assert_allclose(prompted, query, atol=1e-5)
        assert len(llm.embed("the sea", dimensions=4)[0]) == 4
        expected = [float(query @ mean_vector(folder, text)) for text in ("the moon", "a cat")]
        np.testing.assert_allclose(llm.score_pairs("the sea", ["the moon", "a cat"]), expected, atol=1e-5)
        ranked = llm.rerank("the sea", ["the moon", "a cat"])
        assert [one.index for one in ranked] == np.argsort(expected)[::-1].tolist()
        with pytest.raises(ContextOverflow, match="at most 64"):
            llm.embed("sea " * 100)
        [cut] = llm.embed("sea " * 100, truncate=True)
        np.testing.assert_allclose(cut, mean_vector(folder, "sea " * 62), atol=1e-5)
        with pytest.raises(BadRequest, match="classify"):
            llm.classify("the sea")
        with pytest.raises(BadRequest, match="writes none"):
            llm.generate("the sea")
        with pytest.raises(BadRequest, match="pooling is set by the files"):
            llm.embed("the sea", pooling="last")
        with pytest.raises(BadRequest, match="it has 'query'"):
            llm.embed("the sea", prompt_name="other")


def test_a_cross_encoder_and_its_async_twin(tmp_path: Path) -> None:
    kind = "ForSequenceClassification"
    folder = save_encoder(tmp_path / "m", "bert", kind, num_labels=1)
    model, documents = make_model("bert", kind, num_labels=1), ["is blue", "a dog runs", "fish"]
    expected = []
    for document in documents:
        ids, types = encoded(folder, "the sea", document)
        expected.append(float(torch.sigmoid(model(ids, token_type_ids=types).logits[0, 0])))

    async def ask() -> None:
        async with AsyncLLM(str(folder), device="cpu", threads=1, progress=False) as llm:
            np.testing.assert_allclose(await llm.score_pairs("the sea", documents), expected, atol=1e-5)
            ranked = await llm.rerank("the sea", documents)
            assert [one.index for one in ranked] == np.argsort(expected)[::-1].tolist()
            assert ranked[0].document == documents[ranked[0].index]
            [classes] = await llm.classify("the sea")
            assert list(classes.scores) == ["LABEL_0"]
            with pytest.raises(BadRequest, match="gives no embeddings"):
                await llm.embed("the sea")

    asyncio.run(ask())


def test_sparse_weights(tmp_path: Path) -> None:
    folder = save_splade(tmp_path / "m")
    logits = make_model("bert", "ForMaskedLM")(encoded(folder, "the sea")[0]).logits[0]
    expected = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
    with opened(folder) as llm:
        [found] = llm.embed_sparse("the sea")
        np.testing.assert_allclose(found.values, expected[found.indices], atol=1e-4)
        [largest] = llm.embed_sparse("the sea", max_weights=2)
        assert len(largest.values) == 2
        assert llm.score_pairs("the sea", ["the sea"])[0] == pytest.approx(float((expected**2).sum()), rel=1e-4)
        with pytest.raises(BadRequest, match="embed_sparse"):
            llm.embed("the sea")
        with pytest.raises(BadRequest, match="needs a model with a vector per token"):
            llm.embed_tokens("the sea")


def test_vectors_of_tokens(tmp_path: Path) -> None:
    expansion = {"strategy": "fixed", "length": 8}
    with opened(save_colbert(tmp_path / "m", "modernbert", query_expansion=expansion)) as llm:
        [query] = llm.embed_tokens("the sea", role="query")
        documents = llm.embed_tokens(["a red fish", "the moon a sun"])
        assert [one.shape for one in (query, *documents)] == [(8, 16), (4, 16), (5, 16)]  # Without "a".
        expected = [float((query @ one.T).max(axis=1).sum()) for one in documents]
        np.testing.assert_allclose(llm.score_pairs("the sea", ["a red fish", "the moon a sun"]), expected, atol=1e-5)
        ranked = llm.rerank("the sea", ["a red fish", "the moon a sun"])
        assert ranked[0].index == int(np.argmax(expected))
        with pytest.raises(ContextOverflow, match="queries of at most 8"):
            llm.score_pairs("sea " * 9, ["fish"])
        assert len(llm.score_pairs("sea " * 9, ["fish"], truncate=True)) == 1
        with pytest.raises(BadRequest, match="embed_tokens"):
            llm.embed("the sea")


def test_tokens_are_classified(tmp_path: Path) -> None:
    kind = "ForTokenClassification"
    folder = save_encoder(tmp_path / "m", "roberta", kind, num_labels=3)
    with opened(folder) as llm:
        [found] = llm.classify("the sea is blue")
    ids, _ = encoded(folder, "the sea is blue")
    best = make_model("roberta", kind, num_labels=3)(ids).logits[0].argmax(-1).tolist()
    assert [token.token_id for token in found.tokens] == ids[0].tolist()
    assert [token.label for token in found.tokens] == [f"LABEL_{index}" for index in best]


def test_a_classifier_ranks_by_the_class_and_the_text_that_its_files_name(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "bert", "ForSequenceClassification", num_labels=2)
    config = json.loads((folder / "config.json").read_text())
    config["millrace"] = {"pair_text": "what {query} sea {document}", "relevant_label": "LABEL_1"}
    (folder / "config.json").write_text(json.dumps(config))
    documents = ["blue", "the dog runs far away", "moon"]
    model = make_model("bert", "ForSequenceClassification", num_labels=2)
    scores = []
    for document in documents:
        ids = encoded(folder, f"what two fish sea {document}")[0]
        scores.append(float(torch.softmax(model(ids).logits[0], -1)[1]))
    with opened(folder) as llm:
        ranked = llm.rerank("two fish", documents)
    assert [one.index for one in ranked] == np.argsort(scores)[::-1].tolist()
    np.testing.assert_allclose([one.score for one in ranked], sorted(scores, reverse=True), atol=1e-5)
