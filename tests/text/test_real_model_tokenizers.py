"""Tokenizers of the other packaged models give the ids of their published tokenizers.

The digests were made with the published tokenizers: tokenizer.json of Qwen and Gemma, SentencePiece for Llama.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from text import corpus

from millrace.sources.resolve import resolve_model
from millrace.text.detokenizer import Detokenizer
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

pytestmark = pytest.mark.real_models

QWEN, GEMMA, TINYLLAMA = "qwen2.5-coder-1.5b", "gemma-3-270m", "tinyllama-1.1b-chat"


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: load_tokenizer(resolve_model(name)) for name in (QWEN, GEMMA, TINYLLAMA)}


def digest(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(np.asarray(tokenizer.encode(text), dtype="<i4").tobytes() + b"|")
    return found.hexdigest()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (QWEN, "bbfbec309de696f0f533914cc68ada65072ba2afd7f3e4b2734e7de6434ecd07"),
        (GEMMA, "f0b5b8e008c7d86ea6a9ea07d9bff30a27d8fcde993262bbf446976175db1a5d"),
    ],
)
def test_ids_equal_the_published_tokenizer(tokenizers: dict[str, Tokenizer], name: str, expected: str) -> None:
    parts = corpus.written_pieces()
    assert digest(tokenizers[name], [*parts, corpus.large_text(parts)]) == expected


def test_tinyllama_ids_equal_sentence_piece(tokenizers: dict[str, Tokenizer]) -> None:
    # SentencePiece treats <unk> and NUL in a text differently.
    parts = [part for part in corpus.written_pieces() if "<unk>" not in part and "\0" not in part]
    expected = "d9570e3c82e25ee006cbd726d65e68a9f847085c4856330e291a30ca49a8837c"
    assert digest(tokenizers[TINYLLAMA], [*parts, corpus.large_text(parts)]) == expected


def test_ids_equal_transformers(tokenizers: dict[str, Tokenizer]) -> None:
    """Against transformers' conversion, after restoring what it drops: Qwen's NFC, BOS, Llama's space after a token."""
    for name in (QWEN, TINYLLAMA):
        theirs = _converted(name)
        for text in [*corpus.pieces(seed=2), *corpus.with_tokens(["<|im_end|>", "</s>", "<tool_call>", "<s>"])]:
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert tokenizers[name].encode(text, add_special=False) == expected, (name, text[:80])


def _converted(name: str) -> Any:
    from tokenizers import normalizers
    from transformers import AutoTokenizer

    path = resolve_model(name).path
    backend = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    if name == QWEN:
        backend.normalizer = normalizers.NFC()
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    return backend


def test_bos_of_each_model(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers[QWEN].encode("Hello") == [9707]
    assert tokenizers[GEMMA].encode("Hello") == [2, 9259]
    assert tokenizers[TINYLLAMA].encode("Hello") == [1, 15043]
    for tokenizer in tokenizers.values():
        assert tokenizer.encode("Hello") == tokenizer.encode("") + tokenizer.encode("Hello", add_special=False)
    assert tokenizers[GEMMA].encode("<bos>Hello", add_special=False) == [2, 9259]


def test_end_tokens_and_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers[QWEN].end_token_ids == (151645, 151643)
    assert tokenizers[GEMMA].end_token_ids == (1, 106)
    assert tokenizers[TINYLLAMA].end_token_ids == (2,)
    assert tokenizers[QWEN].special_tokens == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert tokenizers[QWEN].vocab_size == 151936
    assert tokenizers[QWEN].decode([9707, 151800, 0]) == "Hello!"
    assert tokenizers[QWEN].encode("[PAD151800]") == tokenizers[QWEN].encode("[PAD") + tokenizers[QWEN].encode(
        "151800]"
    )


def test_streaming_equals_decoding(tokenizers: dict[str, Tokenizer]) -> None:
    draw = random.Random(11)
    for name, tokenizer in tokenizers.items():
        low = [3, 3 + 256] if name == TINYLLAMA else [0, 500]
        for _ in range(300):
            count = draw.randint(1, 24)
            ids = [draw.choice((draw.randrange(tokenizer.vocab_size), draw.randrange(*low))) for _ in range(count)]
            for skip in (True, False):
                stream = Detokenizer(tokenizer, skip_special=skip)
                streamed = "".join(map(stream.push, ids)) + stream.flush()
                assert streamed == tokenizer.decode(ids, skip_special=skip), (name, ids)
