"""What a runner reads of a request's parameters."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

import msgspec

Pooling = Literal["", "last", "mean", "model"]
POOLINGS = ("last", "mean", "model")
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


class DrawParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a runner reads of a request's parameters. `None` and the neutral value both mean "off"."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    """End tokens and stop token ids cannot be drawn before this many output tokens."""
    repetition_penalty: float = 1.0
    """Over prompt and output (Hugging Face definition)."""
    presence_penalty: float = 0.0
    """Over the output only (OpenAI definition), like the frequency penalty."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    """The same seed, prompt and parameters give the same text, whatever else is in the batch."""
    logprobs: int | None = None
    """None = off; k ≥ 0 = of the chosen token and of the k likeliest tokens."""
    prompt_logprobs: int | None = None
    pooling: Pooling = ""
    """Not "": the result is no text but one vector, pooled from the prompt's hidden states and normalised. "model":
    what an encoder's files say, which may be logits instead."""
    second_from: int = 0
    """Encoders: index of the first token of the second of two texts, if the model tells them apart by type."""
    pooled_from: int = 0
    """Encoders: tokens at the beginning that are not pooled."""
    attended: int = 0
    """Encoders: tokens at the beginning that are attended to; 0 = all. Those behind them attend, but are not seen."""
    prediction: tuple[int, ...] = ()
    """Token ids that the answer will probably contain: drafts come from here. They never change the answer."""

    speculate: str = "auto"
    """Who proposes drafts: "off", "auto" (as the engine is set) or a drafter that the engine offers. It never changes
    the answer."""

    # What follows is defined, with the order in which it applies, in docs/api/samplers.md.
    typical_p: float = 1.0
    top_a: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    """0 turns DRY off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = -1
    """Tokens that DRY looks back over; -1: the whole context."""
    dry_breaker_ids: tuple[int, ...] | None = None
    """The tokens that contain a breaker. None: whoever has the tokenizer fills them in (`text.breakers`)."""
    mirostat: int = 0
    """0 is off; 1 and 2 are its versions."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repeat_last_n: int = -1
    """Tokens that the penalties look back over; -1: the whole context, 0 turns them off."""
    dynatemp_range: float = 0.0
    """The temperature varies by this much around `temperature`, with the entropy."""
    dynatemp_exponent: float = 1.0
    logits_processors: tuple[str, ...] = ()
    """Dotted names of functions that the operator allows (`--allow-logits-processors`), applied in this order."""
    bad_word_ids: tuple[tuple[int, ...], ...] | None = None
    """Token sequences of `bad_words`. None: whoever has the tokenizer fills them in (`text.bad_words`)."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens are drawn; None: all. Without an end token among them the answer ends at its length."""

    @property
    def uses_penalties(self) -> bool:
        return self.repeat_last_n != 0 and (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def needs_tokens(self) -> bool:
        """True if what is drawn depends on where earlier tokens are, not only on how many."""
        return (
            self.dry_multiplier > 0
            or (self.repeat_last_n > 0 and self.uses_penalties)
            or bool(self.logits_processors)
            or bool(self.bad_word_ids)
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_shaped(self) -> bool:
        """True if a draw needs more than adjusted logits."""
        return self.needs_tokens or self.allowed_token_ids is not None or (not self.is_greedy and self.has_further_cuts)

    @property
    def needs_logits(self) -> bool:
        """False for rows that a greedy head can draw, once they are past their minimum length."""
        return (
            not self.is_greedy
            or self.logprobs is not None
            or bool(self.logit_bias)
            or self.uses_penalties
            or self.is_shaped
        )

    @property
    def has_further_cuts(self) -> bool:
        """True with an option of docs/api/samplers.md from temperature on, beyond top-k, min-p and top-p."""
        return (
            self.typical_p < 1
            or self.top_a > 0
            or self.xtc_probability > 0
            or self.mirostat > 0
            or self.dynatemp_range > 0
        )

    def of_draws(self) -> DrawParams:
        """These parameters without what only the front and the engine read, such as a grammar's text."""
        return self if type(self) is DrawParams else DrawParams(*_draw_fields_of(self))


_draw_fields_of = attrgetter(*(field.name for field in msgspec.structs.fields(DrawParams)))
