"""Bad words as token sequences."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from millrace.errors import BadRequest
from millrace.params.sampling import SamplingParams
from millrace.text.bad_words import with_bad_word_ids
from millrace.text.tokenizers.tokenizer import Tokenizer

VOCAB = {"a": 0, "b": 1, " ": 2, "ab": 3, " a": 4, "\n": 5, "c": 6, " c": 7}
TOKENIZER = Tokenizer(Backend(BPE(VOCAB, [("a", "b"), (" ", "a"), (" ", "c")])))


def ids(*words: str) -> tuple[tuple[int, ...], ...] | None:
    return with_bad_word_ids(SamplingParams(bad_words=words), TOKENIZER).bad_word_ids


def test_a_word_is_tokenised_with_and_without_a_space() -> None:
    assert ids("a") == ((0,), (4,))
    assert ids("c", " c", "c") == ((6,), (7,))  # leading space or not, and each once
    assert ids("ca") == ((6, 0), (7, 0))


def test_a_form_that_ends_with_the_other_is_left_out() -> None:
    assert ids("b") == ((1,),)  # " b" is a space and b
    assert ids("ab") == ((3,),)


def test_forms_of_different_lengths_both_count() -> None:
    tokenizer = Tokenizer(Backend(BPE({"a": 0, "b": 1, " ": 2, " a": 3, " ab": 4}, [(" ", "a"), (" a", "b")])))
    params = with_bad_word_ids(SamplingParams(bad_words=("ab",)), tokenizer)
    assert params.bad_word_ids == ((0, 1), (4,))


def test_whitespace_alone_stands_for_itself() -> None:
    assert ids("\n", " ") == ((5,), (2,))


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest, match="'zz', which has no tokens") as raised:
        ids("a", "zz")  # this vocabulary has no unknown token
    assert raised.value.param == "bad_words"


def test_nothing_to_do() -> None:
    assert with_bad_word_ids(SamplingParams(), TOKENIZER).bad_word_ids is None
    known = SamplingParams(bad_words=("a",), bad_word_ids=((9,),))
    assert with_bad_word_ids(known, TOKENIZER) is known
