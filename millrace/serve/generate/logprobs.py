"""Log-probabilities of output tokens, as most dialects report them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from millrace.link.messages import TokenLogprobs
from millrace.text.tokenizers.tokenizer import Tokenizer

LEAST = -9999.0
"""Replaces -infinity, which JSON does not have."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def token_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int) -> list[TokenLogprob]:
    return [_token_logprob(tokenizer, entry, num_top) for entry in entries]


def _token_logprob(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> TokenLogprob:
    top = [
        TopLogprob(tokenizer.token_text(token_id), finite(logprob), list(tokenizer.token_bytes(token_id)))
        for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    ]
    return TokenLogprob(
        tokenizer.token_text(entry.token_id),
        finite(entry.logprob),
        list(tokenizer.token_bytes(entry.token_id)),
        top,
    )


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST
