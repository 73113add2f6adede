"""A draft model must have the target's tokens, id by id; padding aside."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from millrace.text.tokenizers.same_tokens import TokenDifference, first_difference
from millrace.text.tokenizers.tokenizer import Tokenizer


def tokenizer(*tokens: str) -> Tokenizer:
    return Tokenizer(Backend(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0])))


def test_equal_tokens() -> None:
    assert first_difference(tokenizer("a", "b"), tokenizer("a", "b")) is None


def test_padding_is_no_difference() -> None:
    assert first_difference(tokenizer("a", "b", "[PAD2]", "[PAD3]"), tokenizer("a", "b")) is None
    assert first_difference(tokenizer("a", "b"), tokenizer("a", "b", "<unused0>")) is None
    assert first_difference(tokenizer("a", "<unused5>"), tokenizer("a", "[PAD1]")) is None


def test_the_lowest_id_that_differs_is_named() -> None:
    assert first_difference(tokenizer("a", "b", "c"), tokenizer("a", "c", "b")) == TokenDifference(1, "b", "c")
    assert first_difference(tokenizer("a", "b"), tokenizer("a", "b", "c")) == TokenDifference(2, None, "c")
