"""The translation that chat and completions share."""

from __future__ import annotations

from typing import Any

from millrace.errors import BadRequest
from millrace.serve.generate.checks import check_integers, check_metadata, refuse_unsupported
from millrace.serve.generate.choosing.best import num_sequences
from millrace.serve.generate.choosing.sampler_fields import sampler_options
from millrace.serve.openai.schemas import (
    NOT_SUPPORTED,
    STREAM_OPTIONS_NOT_SUPPORTED,
    Sampled,
)

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
    "skip_special_tokens",
)
"""Fields that are named as in `SamplingParams`."""


def check_fields(request: Sampled) -> None:
    refuse_unsupported(request, NOT_SUPPORTED, "")
    check_integers(request)
    check_metadata(request.metadata)
    if request.stream_options is not None:
        if not request.stream:
            raise BadRequest(
                "'stream_options' is only allowed when 'stream' is true; remove it or set stream to true.",
                param="stream_options",
            )
        refuse_unsupported(request.stream_options, STREAM_OPTIONS_NOT_SUPPORTED, "stream_options.")


def shared_sampling(request: Sampled) -> dict[str, Any]:
    """Keyword arguments for `sampling_params`."""
    return {name: getattr(request, name) for name in _SAMPLING} | sampler_options(request)


def sequences_of(request: Sampled, n: int) -> int:
    """Sequences to generate per prompt."""
    return num_sequences(request.best_of, n, bool(request.stream), request.self_consistency)


def usage_options(request: Sampled) -> tuple[bool, bool]:
    """Whether a stream reports its usage at the end, and with every chunk."""
    options = request.stream_options
    return bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
