"""The tokenizer for random weights: bytes, bounded by the vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.errors import ModelError
from millrace.sources.resolve import ModelFiles
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.stand_in import build_stand_in


def test_ids_are_bytes() -> None:
    tokenizer = build_stand_in({"vocab_size": 32000, "eos_token_id": 2, "bos_token_id": 1})
    text = "Hello wörld 👍\x00\n"
    assert tokenizer.encode(text) == list(text.encode("utf-8"))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 32000
    assert tokenizer.end_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == frozenset()


def test_ids_above_255_are_visible_but_never_encoded() -> None:
    tokenizer = build_stand_in({"vocab_size": 400})
    assert tokenizer.decode([72, 399, 300]) == "H 399 300"
    assert max(tokenizer.encode(" 399")) < 256


def test_a_small_vocabulary() -> None:
    tokenizer = build_stand_in({"vocab_size": 128, "eos_token_id": [3, 500]})
    assert tokenizer.encode("Hi") == [72, 105]
    assert tokenizer.encode("é") == [127, 127]
    assert tokenizer.end_token_ids == (3,)
    assert tokenizer.vocab_size == 128


@pytest.mark.parametrize("size", [None, 0, "many", True])
def test_a_config_without_vocabulary(size: object) -> None:
    with pytest.raises(ModelError, match="vocab_size is"):
        build_stand_in({"vocab_size": size})


def test_random_models_get_the_stand_in_tokenizer(tmp_path: Path) -> None:
    files = ModelFiles("r", "random", tmp_path / "config.json", {"vocab_size": 300}, ())
    assert load_tokenizer(files).encode("A") == [65]
