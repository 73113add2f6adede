"""Sparse (SPLADE) and multi-vector (ColBERT) outputs are what `transformers`' models and the definitions give."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_encoders import CASES, make_model, save_encoder, write_modules
from helpers.tiny_retrieval import save_colbert, save_splade, save_stanford
from torch import Tensor

from millrace.errors import ContextOverflow, ModelError
from millrace.link.vectors import max_similarity, sparse_of
from millrace.models.encoders.encoder import pack
from millrace.models.encoders.load import LoadedEncoder, load_encoder
from millrace.serve.encode.token_texts import TokenTexts
from millrace.sources.resolve import resolve_model
from millrace.text.tokenizers.hf_tokenizer import build_hf_tokenizer

CPU = torch.device("cpu")
TEXTS = [[2, 5, 6, 7, 3], [2, 9, 3], [2, *range(10, 60), 3], [2, 11, 12, 13, 3]]
MASK = 4


def load(folder: Path) -> LoadedEncoder:
    return load_encoder(resolve_model(str(folder)), device=CPU, dtype=torch.float32)


def run(loaded: LoadedEncoder, texts: list[list[int]], attended: list[int] | None = None) -> list[Tensor]:
    none = [0] * len(texts)
    packed, order = pack(texts, none, none, attended or none)
    results = loaded.head(loaded.encoder(packed), packed)
    by_text = dict(zip(order, results, strict=True))
    return [by_text[index] for index in range(len(texts))]


@pytest.mark.parametrize("case", CASES)
def test_sparse_weights_are_those_of_the_masked_language_model(case: str, tmp_path: Path) -> None:
    loaded, model = load(save_splade(tmp_path / "m", case)), make_model(case, "ForMaskedLM")
    for text, packed in zip(TEXTS, run(loaded, TEXTS), strict=True):
        logits = model(torch.tensor([text])).logits[0]
        expected = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
        found = sparse_of(packed.numpy())
        dense = np.zeros(len(expected), np.float32)
        dense[found.indices] = found.values
        np.testing.assert_allclose(dense, expected, atol=2e-5, rtol=1e-4)
        assert 0 < len(found.values) <= len(expected)


def test_sparse_pooling_is_what_the_module_file_says(tmp_path: Path) -> None:
    folder = save_splade(tmp_path / "m", "bert", pooling_strategy="sum", activation_function="log1p_relu")
    logits = make_model("bert", "ForMaskedLM")(torch.tensor([TEXTS[0]])).logits[0]
    expected = torch.log1p(torch.log1p(torch.relu(logits))).sum(dim=0).numpy()
    found = sparse_of(run(load(folder), [TEXTS[0]])[0].numpy())
    np.testing.assert_allclose(found.values, expected[found.indices], atol=2e-5, rtol=1e-4)
    largest = found.largest(3)
    assert sorted(largest.values) == sorted(expected)[-3:] or np.allclose(sorted(largest.values), sorted(expected)[-3:])
    assert largest.dot(found) == pytest.approx(float((largest.values**2).sum()))


@pytest.mark.parametrize("case", ["bert", "modernbert", "xlm-roberta"])
@pytest.mark.parametrize("is_attended", [False, True])
def test_token_vectors_of_expanded_queries(case: str, is_attended: bool, tmp_path: Path) -> None:
    """Mask tokens see the query; without `attend` no token sees them."""
    folder = save_colbert(tmp_path / "m", case)
    loaded, model = load(folder), make_model(case)
    weight = load_dense(folder)
    query = [2, 5, 6, 7, 3, *[MASK] * 11]
    mask = torch.tensor([[1] * 5 + [int(is_attended)] * 11])
    states = model(torch.tensor([query]), attention_mask=mask).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states @ weight.T, dim=-1)
    found = run(loaded, [TEXTS[1], query], [0, 0 if is_attended else 5])[1]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def load_dense(folder: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(next(folder.glob("*_Dense")) / "model.safetensors")["linear.weight"]


def texts_of(folder: Path) -> TokenTexts:
    form = load(folder).files.multi
    assert form is not None
    return TokenTexts(form, build_hf_tokenizer(folder, {}))


def test_documents_lose_their_punctuation_and_queries_are_filled(tmp_path: Path) -> None:
    """As PyLate saves it: markers, a fixed width of queries, punctuation left out of documents."""
    texts = texts_of(save_colbert(tmp_path / "m", is_pylate=True, query_length=8, document_length=7))
    tokenizer = texts.tokenizer
    query = texts.text(tokenizer.encode("the sea"), "query", 64, "query", may_cut=False)
    marker = tokenizer.token_id("q")
    assert query.token_ids == [2, marker, *tokenizer.encode("the sea", add_special=False), 3, MASK, MASK, MASK]
    assert query.attended == 5
    document = texts.text(tokenizer.encode("the sea a"), "document", 64, "documents", may_cut=False)
    assert document.token_ids[1] == tokenizer.token_id("d")
    assert document.attended == 0
    packed = np.arange(len(document.token_ids) * 2, dtype=np.float32)
    kept = texts.kept(packed, document.token_ids, "document")
    assert kept.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [10, 11]]  # Without the fifth token, "a".
    assert len(texts.kept(packed, document.token_ids, "query")) == len(document.token_ids)
    with pytest.raises(ContextOverflow, match="documents of at most 7"):
        texts.text(tokenizer.encode("the sea is blue and far"), "document", 64, "documents", may_cut=False)
    cut = texts.text(tokenizer.encode("the sea is blue and far"), "document", 64, "documents", may_cut=True)
    assert (len(cut.token_ids), cut.token_ids[-1], cut.num_dropped) == (7, 3, 2)


def test_stanfords_files_are_understood(tmp_path: Path) -> None:
    folder = save_stanford(tmp_path / "m")
    loaded = load(folder)
    assert loaded.head.width == 16
    form = loaded.files.multi
    assert form is not None
    assert (form.document_tokens, form.markers["query"]) == (20, "q ")
    assert form.expansion is not None
    assert (form.expansion.length, form.expansion.is_attended) == (12, True)
    assert form.skipped_words == tuple(string.punctuation)


def test_a_longer_query_passes_where_the_width_is_only_the_least(tmp_path: Path) -> None:
    expansion = {"strategy": "min", "length": 6, "attend": True}
    texts = texts_of(save_colbert(tmp_path / "m", query_expansion=expansion))
    encoded = texts.tokenizer.encode("the sea is blue and the sky")
    query = texts.text(encoded, "query", 64, "query", may_cut=False)
    assert (query.token_ids, query.attended) == (encoded, 0)
    short = texts.text(texts.tokenizer.encode("sea"), "query", 64, "query", may_cut=False)
    assert (short.token_ids[-3:], short.attended) == ([MASK] * 3, 0)


def test_max_similarity_takes_the_best_match_of_each_query_token() -> None:
    query, document = np.eye(3, dtype=np.float32)[:2], np.array([[0.5, 0, 0], [0.25, -1, 0]], np.float32)
    assert max_similarity(query, document, takes_mean=False) == 0.5
    assert max_similarity(query, document, takes_mean=True) == 0.25
    assert max_similarity(query, document[:0], takes_mean=False) == 0.0


@pytest.mark.parametrize(
    ("kinds", "message"),
    [(("SpladePooling", "Normalize"), "beside SpladePooling"), (("Pooling", "MultiVectorMask"), "compares them")],
)
def test_modules_that_contradict_each_other_are_refused(kinds: tuple[str, ...], message: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "bert", "ForMaskedLM")
    write_modules(folder, *kinds)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_sparse_model_without_a_language_model_head_is_refused(tmp_path: Path) -> None:
    folder = save_splade(tmp_path / "m", "bert", suffix="Model")
    with pytest.raises(ModelError, match="masked language model"):
        load(folder)


def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    folder: Any = save_splade(tmp_path / "m", "bert")
    (next(folder.glob("*_SpladePooling")) / "config.json").write_text(json.dumps({"pooling_strategy": "mean"}))
    with pytest.raises(ModelError, match="mean"):
        load(folder)
