"""The default model's vocabulary as llguidance sees it."""

from __future__ import annotations

import pytest

from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.tokenizer import Tokenizer

EXTRA_LOGITS = 100
"""Models may have more logits than tokens."""


@pytest.fixture(scope="session")
def environment(default_tokenizer: Tokenizer) -> GrammarEnvironment:
    return GrammarEnvironment(default_tokenizer, default_tokenizer.vocab_size + EXTRA_LOGITS, 2)
