"""Finds what is wrong with a grammar itself, without the model's vocabulary."""

from __future__ import annotations

import dataclasses

from llguidance import LLMatcher

from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.grammar.problems import sentence_of
from millrace.text.grammar.translate import guidance_source, limits
from millrace.text.tokenizers.stand_in import build_stand_in


class GrammarCheck:
    """Compiles grammars for a vocabulary of single bytes, and follows an answer's first bytes."""

    def __init__(self) -> None:
        self._environment = GrammarEnvironment(build_stand_in({"vocab_size": 257, "eos_token_id": 256}), 257)

    def check(self, grammar: Grammar) -> None:
        """Raise `GrammarError` if no answer can be held to the grammar."""
        if grammar.kind == "lark" and not _is_free_of_special_tokens(grammar):
            return
        self._environment.compile(dataclasses.replace(grammar, after=""))


def _is_free_of_special_tokens(grammar: Grammar) -> bool:
    """False if the grammar names tokens that only the model's vocabulary has. The engine checks those."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(guidance_source(grammar), None, limits=limits())
    if is_error:
        raise GrammarError(sentence_of(messages[0], grammar.noun))
    return not messages
