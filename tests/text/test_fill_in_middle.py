"""Fill in the middle and DRY's breakers: what the vocabulary has decides."""

from __future__ import annotations

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from millrace.params.sampling import SamplingParams
from millrace.text.breakers import with_breaker_ids
from millrace.text.fill_in_middle import fill_in_tokens
from millrace.text.tokenizers.tokenizer import Tokenizer


def tokenizer_with(*names: str) -> Tokenizer:
    backend = Backend(BPE({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(backend)


def test_the_tokens_of_each_family() -> None:
    qwen = fill_in_tokens(tokenizer_with("<|fim_pad|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"))
    assert qwen is not None
    assert qwen.around([0, 1], [2]) == [5, 0, 1, 7, 2, 6]
    deepseek = fill_in_tokens(tokenizer_with("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"))
    assert deepseek is not None
    assert deepseek.around([0], [1]) == [4, 0, 5, 1, 6]
    assert fill_in_tokens(tokenizer_with("<|fim_prefix|>", "<|fim_suffix|>")) is None


def test_breakers_are_tokens_that_contain_the_string() -> None:
    tokenizer = tokenizer_with()

    def ids(*strings: str) -> tuple[int, ...] | None:
        return with_breaker_ids(
            SamplingParams(dry_multiplier=1, dry_sequence_breakers=strings), tokenizer
        ).dry_breaker_ids

    assert ids("a") == (0, 2)
    assert ids("ab") == (2,)
    assert ids("abc") == (3,)  # no token contains it: its own last token
    assert ids() == ()
    assert with_breaker_ids(SamplingParams(), tokenizer).dry_breaker_ids is None
