"""Parameters of one generation request: plain data, validated here, read by `plan` (limits) and `run` (sampling)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import msgspec

from millrace.errors import BadRequest

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
MAX_GRAMMAR_BYTES = 128 * 1024

CLASS_NAMES = ("interactive", "standard", "batch")
"""Priority classes by number; 0 is the most urgent."""

FinishReason = Literal["stop", "length", "abort", "deadline", "error", "cancelled", "refused", "crash"]
"""Why a request ended."""


Pooling = Literal["", "last", "mean", "model"]
POOLINGS = ("last", "mean", "model")
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]

_GRAMMAR_NOUNS: dict[GrammarKind, str] = {
    "json_object": "schema",
    "json_schema": "schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "grammar",
    "gbnf": "grammar",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must conform to."""

    kind: GrammarKind
    source: str = ""
    """By kind: nothing; the schema as JSON text, whose order of properties is that of the answer; a regular expression
    that matches the whole answer; a JSON array of strings; a grammar in Lark or in GBNF notation."""
    after: str = ""
    """What stands before the part that the grammar governs, such as reasoning: rules in Lark notation, of which the
    first is called `before`. Empty: nothing."""
    whitespace: str = ""
    """JSON only: a regular expression for the whitespace that may stand between two JSON tokens. Empty: one space after
    each comma and colon, none elsewhere."""

    def __post_init__(self) -> None:
        num_bytes = sum(
            len(text.encode("utf-8", "surrogatepass")) for text in (self.source, self.after, self.whitespace)
        )
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise BadRequest(
                f"The {self.noun} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed. Send a smaller one.",
                param="grammar",
            )

    @property
    def noun(self) -> str:
        """What a message to the client calls it."""
        return _GRAMMAR_NOUNS[self.kind]


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """After `max_tokens` tokens of reasoning, the token that ends the reasoning is forced."""

    max_tokens: int
    start_id: int
    end_id: int
    is_open: bool
    """The prompt has already begun the reasoning."""


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
        _in_range("max_tokens", self.max_tokens, 0 if self.has_prompt_result else 1, 2**31 - 1)
        _in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _in_range("seed", self.seed, -(2**63), 2**64 - 1)
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
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}); lower min_tokens.",
                param="min_tokens",
            )
        _in_range("n", self.n, 1, MAX_CHOICES)
        _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _at_most("stop", len(self.stop), MAX_STOP_STRINGS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
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
            _in_range(name, getattr(self, name), low, high)
        if self.typical_p == 0.0:
            raise BadRequest("typical_p is 0, which keeps no token; 1 turns it off.", param="typical_p")
        _at_most("dry_sequence_breakers", len(self.dry_sequence_breakers), MAX_BREAKERS)
        _at_most("logits_processors", len(self.logits_processors), MAX_LOGITS_PROCESSORS)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
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
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadRequest("top_p is 0, which keeps no token; use temperature 0 for greedy sampling.", param="top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias:
            _in_range("logit_bias", token_id, 0, 2**31 - 1)
            if not -100.0 <= bias <= 100.0:
                raise BadRequest(
                    f"logit_bias of token {token_id} is {bias:g}; it must be between -100 and 100.", param="logit_bias"
                )
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, 2**31 - 1)


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


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling of requests that leave these fields out; None = the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = "neutral"
    """Where the values come from, in words."""
    stop: tuple[str, ...] = ()
    """Stop strings of requests that send none."""

    def fields(self) -> dict[str, float]:
        """Those that are numbers."""
        values = {name: getattr(self, name) for name in SamplingDefaults.__slots__ if name not in ("source", "stop")}
        return {name: value for name, value in values.items() if value is not None}

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` (None = left out) completed by the defaults. Temperature 0 is plain greedy: nothing is added."""
        present = {name: value for name, value in given.items() if value is not None}
        return present if present.get("temperature") == 0 else {**self.fields(), **present}


NEUTRAL_DEFAULTS = SamplingDefaults()


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    # The comparison is false for NaN, and exact for integers too large for a float.
    if not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise BadRequest(f"{name} has {count} entries; at most {limit} are allowed.", param=name)


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
    _at_most("allowed_token_ids", len(token_ids), MAX_ALLOWED_TOKENS)
    for token_id in (min(token_ids), max(token_ids)):
        _in_range("allowed_token_ids", token_id, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search, as `transformers` defines it."""

    num_beams: int
    length_penalty: float = 1.0
    """Scores are divided by length ** length_penalty: above 0 favours long answers."""
    early_stopping: bool | Literal["never"] = False
    """True: end once there are `num_beams` finished beams. "never": only when no live beam can become better."""

    def __post_init__(self) -> None:
        _in_range("num_beams", self.num_beams, 1, MAX_LOGPROBS)
        _in_range("length_penalty", self.length_penalty, -100.0, 100.0)


@dataclass(frozen=True, slots=True)
class RowParams:
    """What a runner is told about a request beside its tokens. The scheduler reads only whether the prompt is scored or
    pooled."""

    params: DrawParams
    """Given as `SamplingParams`, only what a runner reads of them is kept."""
    end_token_ids: tuple[int, ...] = ()
    scope: str = ""
    """Requests of equal scope may see each other's text, as in the prefix cache."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", self.params.of_draws())

    @property
    def has_late_ends(self) -> bool:
        """End tokens cannot be drawn before a minimum length."""
        return self.params.min_tokens > 0 and bool(self.end_token_ids)

    def to_bytes(self) -> bytes:
        return _row_encoder.encode((self.params, self.end_token_ids, self.scope))

    @staticmethod
    def from_bytes(data: bytes) -> RowParams:
        """Raises a ValueError if the bytes are no parameters."""
        return RowParams(*_row_decoder.decode(data))


_row_encoder = msgspec.msgpack.Encoder()
_row_decoder = msgspec.msgpack.Decoder(tuple[DrawParams, tuple[int, ...], str])


class Retain(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep the blocks of a prompt, or of its beginning, in the prefix cache for a time."""

    ttl_s: float
    name: str = ""
    """Of the handle; a later request of the same owner with this name replaces it. Empty: named after the prefix."""
    num_tokens: int = 0
    """Of the prompt; 0: all."""
    max_bytes: int = 0
    """Quota of all handles of this owner; 0: what the server allows."""
    is_hint: bool = True
    """It may take the place of its owner's older hints."""
    handle_bytes: int = 0
    """Quota of this handle alone; 0: none of its own."""
    is_required: bool = False
    """The request is refused if its prefix cannot be kept."""
    covers_answer: bool = False
    """Keep the answer's blocks too, once the request has ended."""


MAX_DOCUMENTS = 64
"""Of one request."""


class DocumentSpan(msgspec.Struct, frozen=True, array_like=True):
    start: int
    end: int
    first: int
    """The tokens before this one are computed in their place."""


class Documents(msgspec.Struct, frozen=True):
    """Parts of a prompt, in order, whose keys and values may be those of the same text alone. The answer is then an
    approximation."""

    spans: tuple[DocumentSpan, ...]


DEFAULT_ROW_PARAMS = RowParams(DrawParams())
