"""Parameters of one generation request, and their checks. What a runner reads of them is in `draws.py`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import attrgetter

import msgspec

from millrace.errors import BadRequest
from millrace.params.draws import POOLINGS, DrawParams
from millrace.params.grammar import Grammar, ThinkingLimit
from millrace.params.ranges import at_most, in_range

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_TEMPERATURE = 100.0
MAX_BREAKERS = 64
MAX_LOGITS_PROCESSORS = 8
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 128
MAX_ALLOWED_TOKENS = 16384


class SamplingParams(DrawParams, frozen=True, omit_defaults=True):
    """Sampling and stopping. Fields at their defaults do not travel to the engine. `msgspec.structs.replace` makes a
    changed copy."""

    max_tokens: int | None = None
    """Maximum number of output tokens; None = up to the end of the context. 0: only the prompt has results."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    grammar: Grammar | None = None
    """Only tokens that the grammar allows are drawn; the answer ends where the grammar may end."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    bad_words: tuple[str, ...] = ()
    """Strings that the answer must not contain."""
    thinking: ThinkingLimit | None = None
    adapter: str = ""
    """Name of the adapter that answers; empty for the base model."""

    @property
    def is_constrained(self) -> bool:
        """True if something decides before each draw which tokens are allowed."""
        return self.grammar is not None or self.thinking is not None

    @property
    def has_prompt_result(self) -> bool:
        """True if there is a result besides the output: a vector, or the prompt's log-probabilities."""
        return bool(self.pooling) or self.prompt_logprobs is not None

    def __post_init__(self) -> None:
        in_range("max_tokens", self.max_tokens, 0 if self.has_prompt_result else 1, 2**31 - 1)
        in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        in_range("seed", self.seed, -(2**63), 2**64 - 1)
        if _numbers_of(self) != _NEUTRAL_NUMBERS:
            self._check_lengths()
            self._check_numbers()
        if _shape_of(self) != _NEUTRAL_SHAPE:
            self._check_shape()
        if self.pooling and (self.pooling not in POOLINGS or self.max_tokens != 0 or self.is_constrained):
            raise BadRequest(
                f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}, with max_tokens 0 and no"
                " grammar.",
                param="pooling",
            )

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with this seed (0 to 2**63 - 1). Skips validation, because it runs for most requests."""
        seeded = copy(self)
        msgspec.structs.force_setattr(seeded, "seed", seed)
        return seeded

    def _check_lengths(self) -> None:
        in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}); lower min_tokens.",
                param="min_tokens",
            )
        in_range("n", self.n, 1, MAX_CHOICES)
        in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        at_most("stop", len(self.stop), MAX_STOP_STRINGS)
        at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for text in self.stop:
            if not text:
                raise BadRequest(
                    "stop has an empty string, which would end every answer at once; remove it.", param="stop"
                )
            if len(text) > MAX_STOP_STRING_CHARS:
                raise BadRequest(
                    f"stop has a string of {len(text)} characters; at most {MAX_STOP_STRING_CHARS} are allowed.",
                    param="stop",
                )

    def _check_shape(self) -> None:
        """The options of docs/api/samplers.md."""
        for name, (low, high) in _SHAPE_RANGES.items():
            in_range(name, getattr(self, name), low, high)
        if self.typical_p == 0.0:
            raise BadRequest("typical_p is 0, which keeps no token; 1 turns it off.", param="typical_p")
        at_most("dry_sequence_breakers", len(self.dry_sequence_breakers), MAX_BREAKERS)
        at_most("logits_processors", len(self.logits_processors), MAX_LOGITS_PROCESSORS)
        at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            _check_bad_word(word)
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids)
            if self.is_constrained:
                raise BadRequest(
                    "allowed_token_ids cannot be combined with a grammar (of an output format or of tools) or a limit"
                    " on reasoning, which need tokens of their own; remove one of them.",
                    param="allowed_token_ids",
                )

    def _check_numbers(self) -> None:
        in_range("top_k", self.top_k, 0, 2**31 - 1)
        in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadRequest("top_p is 0, which keeps no token; use temperature 0 for greedy sampling.", param="top_p")
        in_range("min_p", self.min_p, 0.0, 1.0)
        in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias:
            in_range("logit_bias", token_id, 0, 2**31 - 1)
            if not -100.0 <= bias <= 100.0:
                raise BadRequest(
                    f"logit_bias of token {token_id} is {bias:g}; it must be between -100 and 100.", param="logit_bias"
                )
        for token_id in self.stop_token_ids:
            in_range("stop_token_ids", token_id, 0, 2**31 - 1)


_SHAPE_RANGES: dict[str, tuple[float, float]] = {
    "typical_p": (0.0, 1.0),
    "top_a": (0.0, 1.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_range": (-1, 2**31 - 1),
    "mirostat": (0, 2),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "repeat_last_n": (-1, 2**31 - 1),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
}
_SHAPE = (*_SHAPE_RANGES, "dry_sequence_breakers", "logits_processors", "bad_words", "allowed_token_ids")
_shape_of = attrgetter(*_SHAPE)
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_NEUTRAL_SHAPE = tuple(_DEFAULTS[name] for name in _SHAPE)
"""Most requests have this shape, which needs no check."""
_NUMBERS = (
    *("min_tokens", "n", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "logit_bias"),
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""The fields that `_check_lengths` and `_check_numbers` check."""
_numbers_of = attrgetter(*_NUMBERS)
_NEUTRAL_NUMBERS = tuple(_DEFAULTS[name] for name in _NUMBERS)


def check_drafter(params: SamplingParams, offered: Sequence[str]) -> None:
    """Refuse a drafter that the engine does not offer."""
    if params.speculate not in ("auto", "off", *offered):
        raise BadRequest(
            f"speculate is {params.speculate[:80]!r}, which this server does not offer; it offers"
            f" {', '.join(dict.fromkeys(('auto', 'off', *offered)))}. Its operator chooses with --speculate.",
            param="speculate",
            code="unsupported_parameter",
        )


def _check_bad_word(word: str) -> None:
    if not word or len(word) > MAX_BAD_WORD_CHARS:
        raise BadRequest(
            f"bad_words has a string of {len(word)} characters; each has 1 to {MAX_BAD_WORD_CHARS}.", param="bad_words"
        )


def _check_allowed(token_ids: tuple[int, ...]) -> None:
    if not token_ids:
        raise BadRequest(
            "allowed_token_ids is empty, so that nothing could be drawn; name tokens or leave it out.",
            param="allowed_token_ids",
        )
    at_most("allowed_token_ids", len(token_ids), MAX_ALLOWED_TOKENS)
    for token_id in (min(token_ids), max(token_ids)):
        in_range("allowed_token_ids", token_id, 0, 2**31 - 1)
