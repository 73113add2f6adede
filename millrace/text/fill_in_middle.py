"""Fill in the middle: the tokens that put a prefix and a suffix around what the model writes."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.text.tokenizers.tokenizer import Tokenizer

_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens before the prefix, before the suffix and before the middle, as families spell them."""


@dataclass(frozen=True, slots=True)
class FillInTokens:
    prefix: int
    suffix: int
    middle: int

    def around(self, before: list[int], after: list[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]


def fill_in_tokens(tokenizer: Tokenizer) -> FillInTokens | None:
    """None if the model has no such tokens."""
    for names in _NAMES:
        prefix, suffix, middle = (tokenizer.token_id(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return FillInTokens(prefix, suffix, middle)
    return None
