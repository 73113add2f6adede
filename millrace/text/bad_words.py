"""Bad words as token sequences: how a word is written at the start of a text, and after a space."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from millrace.errors import BadRequest
from millrace.params.sampling import SamplingParams
from millrace.text.tokenizers.tokenizer import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the token sequences of their bad words."""
    if not params.bad_words or params.bad_word_ids is not None:
        return params
    found = dict.fromkeys(sequence for word in params.bad_words for sequence in _sequences(tokenizer, word))
    return msgspec.structs.replace(params, bad_word_ids=tuple(found))


def _sequences(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """A word that is nothing but whitespace has one form. The form after a space counts only if it is not the other one
    with tokens before it, which is forbidden anyway."""
    bare = word.lstrip()
    texts = [bare, " " + bare] if bare else [word]
    first, *spaced = tokenizer.encode_batch(texts, add_special=False)
    if not first:
        raise BadRequest(f"bad_words has {word[:80]!r}, which has no tokens; remove it.", param="bad_words")
    yield tuple(first)
    for other in spaced:
        if other[-len(first) :] != first:
            yield tuple(other)
