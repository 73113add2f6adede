"""The sampler options of docs/api/samplers.md as fields of a body, for every dialect that takes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from millrace.config import Speculation
from millrace.errors import BadRequest
from millrace.params.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BREAKERS,
    MAX_LOGITS_PROCESSORS,
    MAX_TEMPERATURE,
)
from millrace.serve.generate.checks import check_range
from millrace.serve.http.schema import Strict, described

_SAME_NAME = (
    *("typical_p", "top_a", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "repeat_last_n", "dynatemp_range", "dynatemp_exponent"),
    "speculate",
)
"""Fields that are named as in `SamplingParams`."""
_LISTS = ("dry_sequence_breakers", "logits_processors", "bad_words", "allowed_token_ids")
"""Lists that are named as in `SamplingParams`."""
SAMPLER_NAMES = (
    *(*_SAME_NAME, *_LISTS),
    *("dry_range", "dry_penalty_last_n", "dynatemp_min", "dynatemp_max"),
)
"""Fields that an error may name."""


class SamplerFields(Strict, kw_only=True):
    typical_p: Annotated[
        float | None,
        described(
            "Keep the tokens of typical surprise up to this probability; 1 = off.", exclusiveMinimum=0, maximum=1
        ),
    ] = None
    top_a: Annotated[
        float | None,
        described("Drop tokens below this times the square of the greatest probability.", minimum=0, maximum=1),
    ] = None
    xtc_probability: Annotated[
        float | None, described("How often XTC excludes the top choices; 0 = off.", minimum=0, maximum=1)
    ] = None
    xtc_threshold: Annotated[
        float | None, described("What counts as a top choice; default 0.1.", minimum=0, maximum=1)
    ] = None
    dry_multiplier: Annotated[
        float | None, described("Strength of DRY, which penalises repeated sequences; 0 = off.", minimum=0, maximum=100)
    ] = None
    dry_base: Annotated[float | None, described("Growth per token; default 1.75.", minimum=1, maximum=100)] = None
    dry_allowed_length: Annotated[
        int | None, described("Repetitions shorter than this are free; default 2.", minimum=0)
    ] = None
    dry_range: Annotated[
        int | None, described("Tokens that DRY looks back over; 0 or -1: the whole context.", minimum=-1)
    ] = None
    dry_penalty_last_n: Annotated[
        int | None, described("As `dry_range`, but 0 turns DRY off (llama.cpp's name).", minimum=-1)
    ] = None
    dry_sequence_breakers: Annotated[
        list[str] | None,
        described(
            'Strings that no repetition reaches beyond; default ["\\n", ":", "\\"", "*"].', maxItems=MAX_BREAKERS
        ),
    ] = None
    mirostat: Annotated[
        Literal[0, 1, 2] | None, described("Version of mirostat, which aims at a surprise per token; 0 = off.")
    ] = None
    mirostat_mode: Annotated[Literal[0, 1, 2] | None, described("Another name of `mirostat`.")] = None
    mirostat_tau: Annotated[float | None, described("Aimed surprise, in bits; default 5.", minimum=0, maximum=100)] = (
        None
    )
    mirostat_eta: Annotated[float | None, described("Learning rate; default 0.1.", minimum=0, maximum=10)] = None
    repeat_last_n: Annotated[
        int | None,
        described("Tokens that the three penalties look back over; -1 (default): all, 0: none.", minimum=-1),
    ] = None
    dynatemp_range: Annotated[
        float | None,
        described("Dynamic temperature: varies by this much with the entropy; 0 = off.", minimum=0, maximum=100),
    ] = None
    dynatemp_exponent: Annotated[float | None, described("Its exponent; default 1.", minimum=0, maximum=100)] = None
    dynatemp_min: Annotated[
        float | None, described("With `dynatemp_max`: the bounds, in place of temperature and range.", minimum=0)
    ] = None
    dynatemp_max: Annotated[float | None, described("See `dynatemp_min`.", minimum=0, maximum=int(MAX_TEMPERATURE))] = (
        None
    )
    speculate: Annotated[
        Speculation | None,
        described(
            "Who guesses tokens for this request: `off`, `auto` (default: as the server is set) or a drafter that the"
            " server offers. It never changes the answer."
        ),
    ] = None
    logits_processors: Annotated[
        list[str] | None,
        described(
            "Functions that change the logits, by dotted name; only those of `--allow-logits-processors`.",
            maxItems=MAX_LOGITS_PROCESSORS,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        described(
            "Strings that the answer must not contain: the token that would complete one, as it is tokenised with and"
            " without a space before it, is not drawn. Tokens that end the answer are never forbidden.",
            maxItems=MAX_BAD_WORDS,
            items={"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS},
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        described(
            "Only these tokens are drawn. Without an end token among them the answer ends at its length or at a stop"
            " string. Not with a grammar.",
            minItems=1,
            maxItems=MAX_ALLOWED_TOKENS,
        ),
    ] = None


def sampler_options(body: SamplerFields) -> dict[str, Any]:
    """Keyword arguments for `sampling_params`. With dynatemp_min and dynatemp_max, `temperature` too."""
    options: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    for name in _LISTS:
        values = getattr(body, name)
        if values is not None:
            options[name] = tuple(values)
    check_range("dry_penalty_last_n", body.dry_penalty_last_n, -1, 2**31 - 1)
    options["dry_range"] = _same("dry_range", body.dry_range or None, "dry_penalty_last_n", body.dry_penalty_last_n)
    if options["dry_range"] == 0:
        options |= {"dry_range": None, "dry_multiplier": 0.0}
    options["mirostat"] = _same("mirostat", body.mirostat, "mirostat_mode", body.mirostat_mode)
    return options | _bounds(body)


def _same(name: str, value: int | None, other_name: str, other: int | None) -> int | None:
    if value is not None and other is not None and value != other:
        raise BadRequest(
            f"{name} is {value} and {other_name} is {other}; they are the same option, send one of them.", param=name
        )
    return value if value is not None else other


def _bounds(body: SamplerFields) -> dict[str, float]:
    low, high = body.dynatemp_min, body.dynatemp_max
    if low is None and high is None:
        return {}
    if low is None or high is None or not 0 <= low <= high or body.dynatemp_range is not None:
        raise BadRequest(
            "dynatemp_min and dynatemp_max are the lower and the upper bound, not below 0 and without"
            " 'dynatemp_range'; send both.",
            param="dynatemp_min",
        )
    if high > MAX_TEMPERATURE:
        raise BadRequest(f"dynatemp_max is {high}; it must be between 0.0 and {MAX_TEMPERATURE}.", param="dynatemp_max")
    return {"temperature": (low + high) / 2, "dynatemp_range": (high - low) / 2}
