"""The default model's tokenizer gives the ids, end tokens and text of its original tokenizer."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import regex
from text import corpus

from millrace.errors import BadRequest
from millrace.sources.gguf.reader import read_gguf
from millrace.sources.resolve import ModelFiles
from millrace.text.tokenizers.token_table import CHAR_OF_BYTE
from millrace.text.tokenizers.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<empty_output>"]
GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@pytest.fixture(scope="module")
def transformers_tokenizer(default_files: ModelFiles) -> Any:
    """transformers' own conversion, with the digit rule that SmolLM2's tokenizer.json has and the conversion drops."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(str(default_files.path.parent), gguf_file=default_files.path.name)
    converted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return converted


def test_ids_equal_transformers_on_a_large_varied_text(
    default_tokenizer: Tokenizer, transformers_tokenizer: Any
) -> None:
    parts = corpus.pieces()
    for text in [*parts, corpus.large_text(parts), *corpus.with_tokens(SPECIAL)]:
        assert default_tokenizer.encode(text) == transformers_tokenizer.encode(text), text[:80]


def test_ids_equal_a_reference_written_from_the_definition(
    default_files: ModelFiles, default_tokenizer: Tokenizer
) -> None:
    reference = ReferenceBpe(read_gguf(default_files.path).metadata)
    for text in corpus.written_pieces(seed=3):
        # Texts may contain special tokens, which the reference does not know.
        if not any(token in text for token in default_tokenizer.special_tokens.values()):
            assert default_tokenizer.encode(text) == reference.encode(text), text[:80]


class ReferenceBpe:
    """Byte-level BPE as GPT-2 defines it, after cutting off every digit. Slow and plain."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.word_ids = lru_cache(maxsize=None)(self._word_ids)

    def encode(self, text: str) -> list[int]:
        parts = regex.split(r"(\p{N})", text)
        words = [word for part in parts if part for word in GPT2_WORDS.findall(part)]
        return [index for word in words for index in self.word_ids(word)]

    def _word_ids(self, word: str) -> list[int]:
        symbols = [CHAR_OF_BYTE[byte] for byte in word.encode("utf-8")]
        while True:
            pairs = {pair: self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks}
            if not pairs:
                return [self.ids[symbol] for symbol in symbols]
            left, right = min(pairs, key=pairs.__getitem__)
            joined, place = [], 0
            while place < len(symbols):
                is_pair = symbols[place : place + 2] == [left, right]
                joined.append(left + right if is_pair else symbols[place])
                place += 2 if is_pair else 1
            symbols = joined


def test_decoding_equals_transformers(default_tokenizer: Tokenizer, transformers_tokenizer: Any) -> None:
    draw = random.Random(5)
    for _ in range(400):
        ids = [draw.choice((draw.randrange(49152), draw.randrange(300))) for _ in range(draw.randint(0, 20))]
        for skip in (True, False):
            theirs = transformers_tokenizer.decode(ids, skip_special_tokens=skip)
            assert default_tokenizer.decode(ids, skip_special=skip) == theirs


def test_text_survives_the_round_trip(default_tokenizer: Tokenizer) -> None:
    # Like the published vocabulary, this one lacks some control characters and drops them.
    known = {byte for byte, char in CHAR_OF_BYTE.items() if default_tokenizer.token_id(char) is not None}
    assert len(known) > 230
    for text in corpus.pieces(seed=1):
        kept = bytes(byte for byte in text.encode("utf-8") if byte in known).decode("utf-8", "replace")
        assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special=False) == kept


def test_special_tokens_and_end_tokens(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.end_token_ids == (2, 0)
    assert default_tokenizer.special_ids == frozenset(range(17))
    assert default_tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert default_tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert default_tokenizer.decode([1, 4093, 198, 2]) == "user\n"
    assert default_tokenizer.decode([1, 4093, 198, 2], skip_special=False) == "<|im_start|>user\n<|im_end|>"


def test_no_bos_is_added(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.encode("Hello world") == [19556, 905]
    assert default_tokenizer.encode("Hello world", add_special=False) == [19556, 905]
    assert default_tokenizer.encode("") == []


def test_token_bytes(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.token_bytes(905) == b" world"
    assert default_tokenizer.token_text(905) == " world"
    ids = default_tokenizer.encode("👍🏽 né 中文")
    assert b"".join(map(default_tokenizer.token_bytes, ids)).decode() == "👍🏽 né 中文"
    partial = next(index for index in ids if len(default_tokenizer.token_bytes(index).decode("utf-8", "ignore")) == 0)
    assert default_tokenizer.token_text(partial) == "\ufffd"
    assert default_tokenizer.token_bytes(10**9) == b""


def test_a_batch_equals_single_texts(default_tokenizer: Tokenizer) -> None:
    texts = corpus.SENTENCES
    assert default_tokenizer.encode_batch(texts) == [default_tokenizer.encode(text) for text in texts]


def test_a_lone_surrogate_is_refused(default_tokenizer: Tokenizer) -> None:
    broken = json.loads(r'"ab\ud83dcd"')
    with pytest.raises(BadRequest, match=r"character 2 is the lone surrogate U\+D83D"):
        default_tokenizer.encode(broken)


def test_invalid_ids(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.decode([19556, 49999, 905]) == "Hello world"
    for wrong in (-1, 2**40):
        with pytest.raises(BadRequest, match=f"{wrong} is not a token id"):
            default_tokenizer.decode([19556, wrong])
