"""DRY's sequence breakers as token ids.

A token is a breaker if its text contains one of the strings. For a string that no token contains it is the last token
of its own tokenisation.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from millrace.params.sampling import SamplingParams
from millrace.text.tokenizers.tokenizer import Tokenizer

CACHED_SETS = 16
"""Sets of strings whose tokens are kept: finding them reads the whole vocabulary."""


def with_breaker_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the token ids of their breakers, if they use DRY."""
    if params.dry_multiplier == 0 or params.dry_breaker_ids is not None:
        return params
    return msgspec.structs.replace(params, dry_breaker_ids=_breaker_ids(tokenizer, params.dry_sequence_breakers))


@lru_cache(CACHED_SETS)
def _breaker_ids(tokenizer: Tokenizer, strings: tuple[str, ...]) -> tuple[int, ...]:
    wanted = {string.encode("utf-8", "replace") for string in strings if string}
    found: set[int] = set()
    unseen = set(wanted)
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        inside = [string for string in wanted if string in data]
        if inside:
            found.add(token_id)
            unseen.difference_update(inside)
    for string in unseen:
        found.update(tokenizer.encode(string.decode("utf-8"), add_special=False)[-1:])
    return tuple(sorted(found))
