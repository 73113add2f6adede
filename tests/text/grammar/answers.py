"""Answers within a grammar's masks: given ones, and such as a model that knows nothing would draw."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.params.grammar import Grammar
from millrace.text.grammar.compiler import GrammarError
from millrace.text.grammar.environment import GrammarEnvironment
from millrace.text.grammar.matcher import Matcher
from millrace.text.tokenizers.tokenizer import Tokenizer


def of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def allowed(matcher: Matcher, num_words: int) -> npt.NDArray[np.intp]:
    row = np.full(num_words, 0xFFFFFFFF, np.uint32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def accepts(environment: GrammarEnvironment, grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar lets exactly this text pass, from the first token to an end token."""
    matcher = environment.compile(grammar).matcher()
    try:
        for token in [*tokenizer.encode(text, add_special=False), tokenizer.end_token_ids[0]]:
            if token not in allowed(matcher, environment.num_words):
                return False
            matcher.consume([token])
    except GrammarError:
        return False
    return True


def draw_answer(
    environment: GrammarEnvironment, grammar: Grammar, tokenizer: Tokenizer, seed: int, max_tokens: int = 600
) -> str | None:
    """Text drawn with random logits, as a model that knows nothing would; None if it does not end."""
    noise = np.random.default_rng(seed)
    closing = np.array([tokenizer.token_bytes(token)[:1] in (b'"', b"}", b"]", b",") for token in range(40_000)])
    matcher, tokens = environment.compile(grammar).matcher(), list[int]()
    while len(tokens) < max_tokens:
        choices = allowed(matcher, environment.num_words)
        logits = noise.normal(size=len(choices))
        logits += 5.0 * np.isin(choices, np.flatnonzero(closing))  # so that strings and arrays end some day
        token = int(choices[np.argmax(logits)])
        matcher.consume([token])
        if token in tokenizer.end_token_ids:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None
