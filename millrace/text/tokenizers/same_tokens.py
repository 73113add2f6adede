"""Whether two models have the same tokens, id by id: a draft model must speak the target's tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from millrace.text.tokenizers.tokenizer import Tokenizer

_PADDING = re.compile(r"\[PAD\d+\]|<unused_?\d+>|<\|?(extra|reserved|unused)[^>]*>", re.IGNORECASE)
"""Names of ids that no text encodes to: converters write them where a vocabulary was padded to a round size."""


class TokenDifference(NamedTuple):
    token_id: int
    first: str | None
    """The token of the first tokenizer; None if it has none with this id."""
    second: str | None


def first_difference(first: Tokenizer, second: Tokenizer) -> TokenDifference | None:
    """The lowest id whose tokens differ; None if there is none. An id that one of them lacks is a difference unless it
    is padding in the other."""
    ours, theirs = first.tokens(), second.tokens()
    if ours == theirs:
        return None
    for token_id in sorted(ours.keys() | theirs.keys()):
        own, other = ours.get(token_id), theirs.get(token_id)
        if own == other or (own is None and _is_padding(other)) or (other is None and _is_padding(own)):
            continue
        if not (_is_padding(own) and _is_padding(other)):
            return TokenDifference(token_id, own, other)
    return None


def _is_padding(token: str | None) -> bool:
    return token is not None and _PADDING.fullmatch(token) is not None
