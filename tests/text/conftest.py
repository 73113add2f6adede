"""Tokenizers for these tests: the default model's, and small ones that need no download."""

from __future__ import annotations

import pytest
from text.small_vocabularies import small_byte_level, small_sentence_piece

from millrace.config import DEFAULT_MODEL
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

EXTRA_LOGITS = 100
"""Models may have more logits than tokens."""


@pytest.fixture(scope="session")
def default_files() -> ModelFiles:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def default_tokenizer(default_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_files)


@pytest.fixture(scope="session")
def environment(default_tokenizer: Tokenizer) -> GrammarEnvironment:
    """The default model's vocabulary as llguidance sees it."""
    return GrammarEnvironment(default_tokenizer, default_tokenizer.vocab_size + EXTRA_LOGITS, 2)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return small_byte_level()


@pytest.fixture(scope="session")
def sentence_piece() -> Tokenizer:
    return small_sentence_piece()
