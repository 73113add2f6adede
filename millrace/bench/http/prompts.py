"""Prompts of a given number of tokens, reproducible by seed: exact as token ids, approximate as text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.http.workloads import RequestShape

Prompt = str | list[int]

# Common words that are one token in most vocabularies, so that token counts are close to word counts.
WORDS = (
    "river water mill wheel stone light morning evening garden window table letter paper music summer winter house"
    " street market bread coffee silver golden green yellow little great early often never always under over between"
    " through across while before after again because people children teacher doctor farmer sailor story number"
    " machine engine paper glass metal cloud thunder forest mountain valley island ocean village city bridge road"
    " train wagon horse bird fish flower tree branch root field grass corner door wall floor roof chair lamp book"
    " page word answer question reason chance change moment minute hour week month year voice sound silence colour"
    " shape circle square line point edge centre north south east west quick slow heavy gentle strong quiet bright"
    " dark warm cold clear simple open close carry bring build break begin follow lead listen speak write read learn"
    " teach remember forget travel return arrive leave wait watch wonder believe hope promise keep find lose"
).split()


@dataclass(frozen=True, slots=True)
class IdPrompts:
    """Token ids drawn from a pool: exactly the requested number."""

    seed: int
    pool: Sequence[int]

    def make(self, shape: RequestShape) -> Prompt:
        shared = _rng(self.seed, shape.group, -1).choices(self.pool, k=shape.shared_tokens)
        return shared + _rng(self.seed, shape.group, shape.index).choices(self.pool, k=shape.own_tokens)


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Words: about the requested number of tokens."""

    seed: int
    tokens_per_word: float

    def make(self, shape: RequestShape) -> Prompt:
        parts = (
            self._words(shape.shared_tokens, shape.group, -1),
            self._words(shape.own_tokens, shape.group, shape.index),
        )
        return " ".join(part for part in parts if part)

    def _words(self, tokens: int, group: str, index: int) -> str:
        count = max(round(tokens / self.tokens_per_word), 1) if tokens else 0
        return " ".join(_rng(self.seed, group, index).choices(WORDS, k=count))


PromptMaker = IdPrompts | TextPrompts


def sample_text(words: int, seed: int) -> str:
    """A calibration text with a known number of words."""
    return " ".join(_rng(seed, "sample", 0).choices(WORDS, k=words))


def _rng(seed: int, group: str, index: int) -> random.Random:
    return random.Random(f"{seed}/{group}/{index}")
