"""Builds the requests of a run from settings: lengths, traces, data sets, shared prefixes, several turns, schemas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.load.lengths import Lengths
from millrace.load.sources import Conversation, TracedRequest

WORDS = (
    "river wheel stone water grain miller stream bridge garden winter summer letter window engine market village"
    " number simple answer reason matter between morning evening history science people country family system"
).split()
BLOCK_TOKENS = 512
"""Tokens of a prefix block in a trace."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One conversation to hold: its turns are sent one after the other, each when the one before has been answered."""

    number: int
    at_s: float
    """Intended time of the first turn; negative in a closed loop: as soon as a client is free."""
    turns: tuple[str, ...]
    max_tokens: tuple[int, ...]
    system: str = ""
    schema: dict[str, Any] | None = None
    model: str = ""
    """Empty: the model of the run."""
    priority: str = ""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    prompt: Lengths
    output: Lengths
    turns: int = 1
    prefix_tokens: int = 0
    """Length of a prefix that requests share."""
    num_prefixes: int = 1
    dataset: tuple[Conversation, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()
    models: tuple[str, ...] = ()
    """Models or adapters, taken in turn."""
    priority: str = ""
    tokens_per_word: float = 1.3
    seed: int = 0


class Workload:
    """Request `number` is the same in every process and run with the same settings."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings

    def request(self, number: int, at_s: float) -> LoadRequest:
        settings = self._settings
        rng = np.random.default_rng((settings.seed, number))
        prefix = f"prefix {number % settings.num_prefixes}" if settings.prefix_tokens else ""
        schema = settings.schemas[number % len(settings.schemas)] if settings.schemas else None
        if settings.dataset:
            conversation = settings.dataset[number % len(settings.dataset)]
            turns: tuple[str, ...] = conversation.turns[: settings.turns]
            schema = schema or conversation.schema
        else:
            turns = tuple(
                self._text(f"request {number} turn {turn}", settings.prompt(rng), rng) for turn in range(settings.turns)
            )
        return LoadRequest(
            number=number,
            at_s=at_s,
            turns=turns,
            max_tokens=tuple(settings.output(rng) for _ in turns),
            system=self._fixed_text(prefix, settings.prefix_tokens) if prefix else "",
            schema=schema,
            model=settings.models[number % len(settings.models)] if settings.models else "",
            priority=settings.priority,
        )

    def traced(self, number: int, one: TracedRequest, speed: float) -> LoadRequest:
        """A request of a trace. Equal blocks become equal text, so prefixes are reused as they were."""
        rng = np.random.default_rng((self._settings.seed, number))
        shared = [self._fixed_text(f"block {block}", BLOCK_TOKENS) for block in one.blocks[:-1]]
        left = max(1, one.prompt_tokens - BLOCK_TOKENS * len(shared))
        text = "\n".join([*shared, self._text(f"request {number}", left, rng)])
        return LoadRequest(number, one.at_s / speed, (text,), (one.output_tokens,), priority=self._settings.priority)

    def _text(self, head: str, num_tokens: int, rng: np.random.Generator) -> str:
        num_words = max(1, round(num_tokens / self._settings.tokens_per_word) - len(head.split()))
        return f"{head}: " + " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), num_words))

    def _fixed_text(self, name: str, num_tokens: int) -> str:
        seed = int.from_bytes(name.encode()[-8:], "little")
        return self._text(name, num_tokens, np.random.default_rng(seed))


def endless_numbers(first: int, step: int) -> Iterator[int]:
    return itertools.count(first, step)
