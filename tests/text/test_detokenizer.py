"""Streamed text equals decoding all ids at once, and is returned as early as possible."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.suite import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text import corpus
from text.small_vocabularies import small_byte_level, small_sentence_piece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel

from millrace.errors import ModelError
from millrace.text.detokenizer import Detokenizer
from millrace.text.tokenizers.stand_in import build_stand_in
from millrace.text.tokenizers.tokenizer import Tokenizer

BYTE_LEVEL = small_byte_level()
SENTENCE_PIECE = small_sentence_piece()
NO_SPACE = small_sentence_piece(add_space_prefix=False)
WORDS = Tokenizer(Backend(WordLevel({"a": 0, "b": 1, "<x>": 2}, unk_token="<x>")))


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special=skip_special)
    return [*map(stream.push, ids), stream.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Mostly low ids, where special and byte tokens are, and some ids beyond the vocabulary."""
    return st.lists(st.one_of(st.integers(0, 270), st.integers(0, tokenizer.vocab_size + 3)), max_size=40)


@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SENTENCE_PIECE, NO_SPACE, WORDS], ids=["bytes", "spm", "bare", "words"]
)
@settings(max_examples=examples(120))
@given(data=st.data(), skip=st.booleans())
def test_any_ids(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(tokenizer))
    parts = streamed(tokenizer, ids, skip_special=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special=skip)
    "".join(parts).encode("utf-8")  # no half of a surrogate pair anywhere


@settings(max_examples=examples(120))
@given(ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_160)), max_size=50), skip=st.booleans())
def test_any_ids_of_the_default_model(default_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(streamed(default_tokenizer, ids, skip_special=skip)) == default_tokenizer.decode(
        ids, skip_special=skip
    )


@settings(max_examples=examples(80))
@given(st.binary(max_size=24))
def test_any_bytes(data: bytes) -> None:
    for tokenizer, first in ((BYTE_LEVEL, 3), (SENTENCE_PIECE, 3)):
        ids = [first + byte for byte in data]
        assert "".join(streamed(tokenizer, ids, skip_special=True)) == tokenizer.decode(ids)
    assert BYTE_LEVEL.decode([3 + byte for byte in data]) == data.decode("utf-8", "replace")


@given(st.text(max_size=60))
def test_text_is_returned_once_its_characters_are_complete(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    stream = Detokenizer(BYTE_LEVEL)
    shown, data = "", b""
    for index in ids:
        shown += stream.push(index)
        data += BYTE_LEVEL.token_bytes(index)
        assert shown == data.decode("utf-8", "ignore")


def test_incomplete_character_is_never_returned(default_tokenizer: Tokenizer) -> None:
    for text in corpus.SENTENCES:
        if "\ufffd" in text:
            continue
        ids = default_tokenizer.encode(text)
        parts = streamed(default_tokenizer, ids, skip_special=False)
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) == default_tokenizer.decode(ids, skip_special=False)


def test_incomplete_character_becomes_a_replacement_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("👍")
    stream = Detokenizer(BYTE_LEVEL)
    assert [stream.push(index) for index in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(BYTE_LEVEL.encode("h")[0]) == "h"


def test_hidden_token_does_not_split_a_character() -> None:
    first, *rest = BYTE_LEVEL.encode("👍")
    ids = [first, 0, *rest]
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special=True)) == "👍"
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special=False)).startswith("\ufffd<|end|>\ufffd")


def test_runs_of_byte_tokens() -> None:
    thumb = SENTENCE_PIECE.encode("👍", add_special=False)[1:]
    cat = SENTENCE_PIECE.token_id("▁cat")
    assert cat is not None
    assert streamed(SENTENCE_PIECE, [cat, *thumb, cat], skip_special=True) == ["cat", "", "", "", "", "👍 cat", ""]
    # One wrong byte spoils the run, as Hugging Face decodes it.
    assert "".join(streamed(SENTENCE_PIECE, [*thumb, 3 + 0xFF, cat], skip_special=True)) == "\ufffd" * 5 + " cat"


def test_only_the_first_space_is_removed() -> None:
    cat = SENTENCE_PIECE.token_id("▁cat")
    assert cat is not None
    assert streamed(SENTENCE_PIECE, [1, cat, cat], skip_special=True) == ["", "cat", " cat", ""]
    assert streamed(SENTENCE_PIECE, [1, cat, cat], skip_special=False) == ["<s>", " cat", " cat", ""]
    assert streamed(NO_SPACE, [1, cat, cat], skip_special=True) == ["", " cat", " cat", ""]
    assert streamed(SENTENCE_PIECE, [3 + 0x20, 3 + 0x41], skip_special=True) == ["", "", "A"]


def test_streams_are_independent(default_tokenizer: Tokenizer) -> None:
    texts = ["né 👍🏽 中文", "plain words", "emoji 🙂🙃 end"]
    streams = [Detokenizer(default_tokenizer) for _ in texts]
    shown = [""] * len(texts)
    ids = [default_tokenizer.encode(text) for text in texts]
    for step in range(max(map(len, ids))):
        for place, stream in enumerate(streams):
            if step < len(ids[place]):
                shown[place] += stream.push(ids[place][step])
    assert shown == texts


def test_the_stand_in_streams() -> None:
    tokenizer = build_stand_in({"vocab_size": 300})
    ids = [*"hé".encode(), 256, 299]
    assert streamed(tokenizer, ids, skip_special=True) == ["h", "", "é", " 256", " 299", ""]
    assert tokenizer.decode(ids) == "hé 256 299"


@pytest.mark.parametrize("cleans", [True, False])
def test_word_pieces_stream_as_their_decoder_writes_them(cleans: bool) -> None:
    words = ["sea", "##side", "is", "##n", "'", "t", ",", ".", "don", "do not", "'s", "blue", "##"]
    backend = Backend(WordLevel({word: index for index, word in enumerate(words)}, unk_token="sea"))
    backend.decoder = decoders.WordPiece(cleanup=cleans)
    tokenizer = Tokenizer(backend)
    for ids in ([0, 1, 6, 2, 3, 4, 5, 11, 7], [0, 9, 11, 10, 0, 12, 7], [7, 0]):
        assert "".join(streamed(tokenizer, ids, skip_special=True)) == tokenizer.decode(ids) == backend.decode(ids)


def test_unsupported_decoder_is_refused() -> None:
    backend = Backend(WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="decoder is CTC, which is not supported"):
        Detokenizer(Tokenizer(backend))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ModelError, match="ByteFallback \\+ Strip"):
        Detokenizer(Tokenizer(backend))
