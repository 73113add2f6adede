"""Tokenizers built from GGUF metadata: pre-tokenizers, SentencePiece merges, flags, and bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text import corpus
from text.small_vocabularies import (
    CONTROL,
    NORMAL,
    byte_level_metadata,
    metadata_of,
    sentence_piece_metadata,
    small_byte_level,
    small_sentence_piece,
)

from millrace.errors import ModelError
from millrace.text.tokenizers import merge_cache
from millrace.text.tokenizers.gguf_tokenizer import build_gguf_tokenizer
from millrace.text.tokenizers.pre_tokenizers import RECIPES, recipe_for
from millrace.text.tokenizers.spm_merges import derive_merges
from millrace.text.tokenizers.token_table import BYTE_OF_CHAR

SAMPLE = "He'LL say 12345 x²  \n\n dogs,\tCamelCase/é中文!?\r\n"


def cut(pre: str, text: str) -> list[str]:
    pieces = recipe_for(pre, "a.gguf").pre_tokenizer(space_first=False).pre_tokenize_str(text)
    return [bytes(BYTE_OF_CHAR[ord(char)] for char in piece).decode("utf-8") for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "He|'|LL| say| 12345| x|²|  \n\n| dogs|,|\t|CamelCase|/|é中文|!?|\r\n"),
        ("llama-bpe", "He|'LL| say| |123|45| x|²|  \n\n| dogs|,|\tCamelCase|/é中文|!?\r\n"),
        ("qwen2", "He|'LL| say| |1|2|3|4|5| x|²|  \n\n| dogs|,|\tCamelCase|/é中文|!?\r\n"),
        ("smollm", "He|'|LL| say| |1|2|3|4|5| x|²|  \n\n| dogs|,|\t|CamelCase|/|é中文|!?|\r\n"),
        ("tekken", "He|'LL| say| |1|2|3|4|5| x|²|  \n\n| dogs|,|\tCamel|Case|/é中文|!?\r\n"),
        ("gpt-4o", "He'LL| say| |123|45| x|²|  \n\n| dogs|,|\tCamel|Case|/é中文|!?\r\n"),
        ("deepseek-v3", "He|'LL| say| |123|45| x|²|  \n\n| dogs|,|\tCamelCase|/|é|中文|!?\r\n"),
        ("deepseek-coder", "He|'|LL| say| |1|2|3|4|5| x|²|  |\n|\n| dogs|,|\tCamelCase|/|é|中文|!?|\r|\n"),
        ("default", "He|'|LL| say| |123|45| x|²|  \n\n| dogs|,|\t|CamelCase|/|é中文|!?|\r\n"),
    ],
)
def test_each_pre_tokenizer_splits_as_its_family_does(pre: str, expected: str) -> None:
    assert "|".join(cut(pre, SAMPLE)) == expected


@pytest.mark.parametrize("pre", sorted(RECIPES))
def test_every_pre_tokenizer_keeps_the_whole_text(pre: str) -> None:
    for text in corpus.written_pieces():
        assert "".join(cut(pre, text)) == text
    assert small_byte_level(pre=pre).decode(small_byte_level(pre=pre).encode("hello world 12 é")) == "hello world 12 é"


def test_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"small.gguf: the pre-tokenizer 'surprise' .*Supported: .*qwen2"):
        small_byte_level(pre="surprise")


def test_missing_pre_tokenizer_name_follows_from_the_family() -> None:
    plain = byte_level_metadata()
    del plain["tokenizer.ggml.pre"]
    decomposed = "e\u0301"
    qwen = build_gguf_tokenizer(plain | {"general.architecture": "qwen2"}, "a.gguf")
    assert qwen.decode(qwen.encode(decomposed)) == "é"
    other = build_gguf_tokenizer(plain, "a.gguf")
    assert other.decode(other.encode(decomposed)) == decomposed


def test_byte_level_ids(byte_level: Any) -> None:
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    encoded = [tokens[index] for index in byte_level.encode("hello world  hé<|im_end|><call> 12")]
    assert encoded == ["hello", "Ġworld", "Ġ", "Ġ", "h", "Ã©", "<|im_end|>", "<call>", "Ġ", "12"]


def test_padding_rows_have_no_text(byte_level: Any) -> None:
    last = byte_level.vocab_size - 1
    assert byte_level.decode([last]) == byte_level.token_text(last) == ""
    assert last not in byte_level.encode(f"[PAD{last}]")


def test_whole_words_ignore_merges() -> None:
    extra = byte_level_metadata(pre="llama-bpe")
    tokens, types = extra["tokenizer.ggml.tokens"], extra["tokenizer.ggml.token_type"]
    extra |= {"tokenizer.ggml.tokens": [*tokens, "zebra"], "tokenizer.ggml.token_type": [*types, NORMAL]}
    assert build_gguf_tokenizer(extra, "a").encode("zebra", add_special=False) == [len(tokens)]
    extra["tokenizer.ggml.pre"] = "gpt-2"
    assert len(build_gguf_tokenizer(extra, "a").encode("zebra")) == 5


def test_bos_and_eos_follow_the_flags() -> None:
    body = small_byte_level().encode("hello")
    assert small_byte_level(add_bos_token=True).encode("hello") == [0, *body]
    assert small_byte_level(add_bos_token=True).encode("hello", add_special=False) == body
    assert small_byte_level(pre="llama-bpe").encode("hello") == [0, *body]
    assert small_byte_level(pre="llama-bpe", add_bos_token=False).encode("hello") == body
    assert small_byte_level(add_eos_token=True, eos_token_id=1).encode("hello") == [*body, 1]


def test_end_tokens_are_named_or_well_known() -> None:
    assert small_byte_level(eos_token_id=0).end_token_ids == (0, 1)
    assert small_byte_level(eos_token_id=1, eot_token_id=2).end_token_ids == (1, 2)
    assert small_sentence_piece().end_token_ids == (2, small_sentence_piece().token_id("<end_of_turn>"))


# ── SentencePiece ─────────────────────────────────────────────────────────────────────────────────────────────────────
def spelled(tokenizer: Any, text: str) -> list[str]:
    tokens = sentence_piece_metadata()["tokenizer.ggml.tokens"]
    return [tokens[index] for index in tokenizer.encode(text)]


def test_sentence_piece_ids(sentence_piece: Any) -> None:
    assert spelled(sentence_piece, "the cat in") == ["<s>", "▁the", "▁cat", "▁in"]
    assert spelled(sentence_piece, " the") == ["<s>", "▁", "▁the"]
    assert spelled(sentence_piece, "the   cat") == ["<s>", "▁the", "▁▁", "▁cat"]
    assert spelled(sentence_piece, "é中文") == ["<s>", "▁é", "中文"]
    assert spelled(sentence_piece, "Z\n") == ["<s>", "▁", "<0x5A>", "<0x0A>"]
    assert spelled(sentence_piece, "the</s>the<tool>in") == ["<s>", "▁the", "</s>", "▁the", "<tool>", "▁in"]
    assert sentence_piece.encode("") == [1]


def test_sentence_piece_decodes(sentence_piece: Any) -> None:
    for text in ("the cat", " the", "é中文 Z 👍\n", "the</s>"):
        assert sentence_piece.decode(sentence_piece.encode(text)) == text.replace("</s>", "")
    assert sentence_piece.decode(sentence_piece.encode("the"), skip_special=False) == "<s> the"


def test_leading_space_is_optional() -> None:
    bare = small_sentence_piece(add_space_prefix=False)
    assert spelled(bare, "the cat") == ["<s>", "t", "he", "▁cat"]
    assert bare.decode(bare.encode(" the")) == " the"


def test_gemma_always_gets_bos_and_never_a_space() -> None:
    gemma = small_sentence_piece(architecture="gemma3", add_bos_token=False)
    assert spelled(gemma, "the cat") == ["<s>", "t", "he", "▁cat"]


def test_llama_without_bos() -> None:
    assert spelled(small_sentence_piece(add_bos_token=False), "the") == ["▁the"]


def test_runs_of_spaces_written_with_real_spaces_are_found() -> None:
    entries = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0), ("▁", 1, -5.0), ("a", 1, -6.0)]
    entries += [(" " * count, 4, -1000.0) for count in range(2, 5)]
    tokenizer = build_gguf_tokenizer(metadata_of("llama", entries, architecture="gemma2"), "a.gguf")
    assert tokenizer.encode("a" + " " * 3 + "a", add_special=False) == [4, 6, 4]
    assert tokenizer.encode(" " * 9, add_special=False) == [7, 7, 3]
    assert tokenizer.decode([4, 7, 4]) == "a    a"


def test_placeholder_scores_mean_the_order_of_ids() -> None:
    entries = [("<unk>", 2, -1000.0), ("<s>", 3, -1000.0), ("</s>", 3, -1000.0)]
    entries += [(token, 1, -1000.0) for token in ("ab", "bc", "▁", "a", "b", "c")]
    tokenizer = build_gguf_tokenizer(metadata_of("llama", entries, add_space_prefix=False), "a.gguf")
    assert tokenizer.encode("abc", add_special=False) == [3, 8]


@given(
    st.lists(st.text("ab▁", min_size=1, max_size=6), unique=True, max_size=40),
    st.lists(st.integers(-4, 0), min_size=40, max_size=40),
)
def test_merges_are_in_the_order_that_hugging_face_writes(tokens: list[str], scores: list[int]) -> None:
    ids = {token: index for index, token in enumerate(tokens)}
    expected = []
    for token, score in zip(tokens, scores, strict=False):
        splits = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        expected += [(score, pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    expected.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
    assert derive_merges(ids, list(map(float, scores))) == [pair for _, pair in expected]


def test_merges_of_large_vocabularies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(merge_cache, "MIN_CACHED_TOKENS", 3)
    ids = {token: index for index, token in enumerate(["▁", "a", "b", "ab", "▁ab"])}
    scores = [-5.0, -4.0, -3.0, -2.0, -1.0]
    expected = derive_merges(ids, scores)
    assert merge_cache.merges_of(ids, scores) == expected == [("▁", "ab"), ("a", "b")]
    (kept,) = (tmp_path / "millrace" / "merges").glob("*.npy")
    monkeypatch.setattr(merge_cache, "derive_merges", None)
    assert merge_cache.merges_of(ids, scores) == expected
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(merge_cache, "MIN_CACHED_TOKENS", 3)
    for broken in (b"", b"junk", kept.read_bytes()[:-3]):
        kept.write_bytes(broken)
        assert merge_cache.merges_of(ids, scores) == expected
    np.save(kept, np.array([[0, 99]], dtype=np.int32))
    assert merge_cache.merges_of(ids, scores) == expected


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(merge_cache, "MIN_CACHED_TOKENS", 1)
    assert merge_cache.merges_of({"a": 0, "b": 1, "ab": 2}, [0.0, 0.0, 0.0]) == [("a", "b")]


# ── bad files ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "has no vocabulary"),
        ({"tokenizer.ggml.tokens": []}, "has no vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for 2"),
        ({"tokenizer.ggml.scores": [0.5]}, "scores has 1 entries for"),
        ({"tokenizer.ggml.merges": None}, "has no merges"),
        ({"tokenizer.ggml.merges": ["a nosuchtoken"]}, "cannot be built.*nosuchtoken"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', which is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is 'None', which is not supported"),
    ],
)
def test_damaged_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"^bad.gguf.*" + message):
        build_gguf_tokenizer(byte_level_metadata() | change, "bad.gguf")


def test_ids_out_of_range_are_ignored() -> None:
    tokenizer = small_byte_level(bos_token_id=10**6, eos_token_id=10**6, add_bos_token=True)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("h") == small_byte_level().encode("h")


def test_end_tokens_are_special_without_token_types() -> None:
    bare = byte_level_metadata(eos_token_id=1)
    del bare["tokenizer.ggml.token_type"]
    tokenizer = build_gguf_tokenizer(bare, "a.gguf")
    assert tokenizer.encode("h<|im_end|>")[-1] == 1
    assert tokenizer.special_ids == {0, 1}


def test_templates_by_name() -> None:
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert build_gguf_tokenizer(metadata, "a").chat_templates == {"default": "A", "tool_use": "B"}
    assert CONTROL == 3
