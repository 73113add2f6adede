"""Encoders from GGUF files give what `transformers` gives with the same weights, and their tokenizers the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.gguf_encoders import write_bert, write_nomic
from helpers.gguf_files import write_gguf
from helpers.tiny_encoders import make_model, write_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models

from millrace.errors import ModelError
from millrace.models.encoders.encoder import pack
from millrace.models.encoders.load import LoadedEncoder, load_encoder
from millrace.models.spec.families import find_family
from millrace.sources.encoders.encoder_files import read_encoder
from millrace.sources.resolve import resolve_model
from millrace.text.tokenizers.gguf_tokenizer import build_gguf_tokenizer
from millrace.text.tokenizers.load import load_tokenizer

CPU = torch.device("cpu")
TEXTS = [[2, 5, 6, 7, 3], [2, 9, 3], [2, *range(10, 50), 3]]


def load(path: Path) -> LoadedEncoder:
    return load_encoder(resolve_model(str(path)), device=CPU, dtype=torch.float32)


def results(loaded: LoadedEncoder, texts: list[list[int]]) -> list[torch.Tensor]:
    packed, order = pack(texts, [0] * len(texts), [0] * len(texts))
    found = dict(zip(order, loaded.head(loaded.encoder(packed), packed), strict=True))
    return [found[index] for index in range(len(texts))]


@pytest.mark.parametrize(("case", "pooling"), [("bert", 1), ("bert", 2), ("roberta", 1), ("nomic_bert", 1)])
def test_vectors_are_those_of_transformers(case: str, pooling: int, tmp_path: Path) -> None:
    """Position rows that RoBERTa does not use are not in the file."""
    path = tmp_path / "m.gguf"
    loaded = load(write_nomic(path) if case == "nomic_bert" else write_bert(path, case, pooling=pooling))
    model = make_model(case)
    for text, vector in zip(TEXTS, results(loaded, TEXTS), strict=True):
        states = model(torch.tensor([text])).last_hidden_state[0]
        expected = states.mean(0) if pooling == 1 else states[0]
        torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-4, rtol=1e-3)


def test_a_reranker_gives_its_score(tmp_path: Path) -> None:
    changes = {"num_labels": 1}
    loaded = load(write_bert(tmp_path / "m.gguf", "roberta", "ForSequenceClassification", pooling=4, **changes))
    assert loaded.files.ranks
    model = make_model("roberta", "ForSequenceClassification", **changes)
    for text, logits in zip(TEXTS, results(loaded, TEXTS), strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([text])).logits[0], atol=2e-5, rtol=1e-4)


def test_word_pieces_are_those_of_the_original_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    original = Backend.from_file(str(tmp_path / "tokenizer.json"))
    original.add_special_tokens(["[MASK]", "[SEP]"])
    tokenizer = load_tokenizer(resolve_model(str(write_bert(tmp_path / "m.gguf"))))
    for text in ("The sea is blue.", "a fish SWIMS far away", "  a\n b c ", "unknown çedilla", "[MASK] the [SEP] sea"):
        assert tokenizer.encode(text) == original.encode(text).ids
    pair = original.encode("the sea", "is blue")
    ids, second_from = tokenizer.pair.join(
        tokenizer.encode("the sea", add_special=False), tokenizer.encode("is blue", add_special=False)
    )
    assert ids == pair.ids
    assert [0] * second_from + [1] * (len(ids) - second_from) == pair.type_ids


def test_a_unigram_vocabulary_is_that_of_xlm_roberta() -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -2.0), ("▁sea", -3.0), ("▁", -4.0)]
    pieces += [(letter, -6.0) for letter in "thesao"]
    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * (len(pieces) - 4)],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    tokenizer = build_gguf_tokenizer(metadata, "m.gguf")
    from transformers import XLMRobertaTokenizer

    original = XLMRobertaTokenizer(vocab=pieces)
    assert isinstance(original._tokenizer.model, models.Unigram)  # transformers' own.
    for text in ("the sea", "  the   sea the ", "seat", "the qq sea"):
        assert tokenizer.encode(text) == original(text)["input_ids"]
    assert tokenizer.pair.between == (2, 2)


def test_the_pooling_of_the_metadata_is_read_and_its_absence_told(tmp_path: Path) -> None:
    named = read_encoder(resolve_model(str(write_bert(tmp_path / "named.gguf", pooling=2))))
    assert named is not None
    assert (named.pooling, named.has_modules, named.max_tokens) == (("cls",), True, 64)
    unnamed = read_encoder(resolve_model(str(write_bert(tmp_path / "unnamed.gguf", pooling=0))))
    assert unnamed is not None
    assert (unnamed.pooling, unnamed.has_modules) == (("mean",), False)


def test_experts_are_refused_with_a_file_that_would_work(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {}, "nomic-bert-moe")
    with pytest.raises(ModelError, match="nomic-embed-text-v1.5"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("architecture", "instead"),
    [("DebertaV2ForSequenceClassification", "bge-reranker"), ("JinaEmbeddingsV3Model", "bge-m3"), ("OPTModel", "")],
)
def test_encoders_that_cannot_be_loaded_are_refused_with_models_that_can(architecture: str, instead: str) -> None:
    with pytest.raises(ModelError, match=f"{architecture}, which is not supported.*{instead}"):
        find_family({"architectures": [architecture]})
