"""The sampling options of `chat` and `generate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.params.sampling import SamplingParams

SamplingFields = Mapping[str, object]
"""Sampling that the user asked for, by the names of `SamplingParams`. The model or the server chooses the rest."""


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling (default: what the model recommends)")
    shown = "up to the context limit" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"maximum output tokens (default: {shown})"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="randomness; 0 = greedy")
    group.add_argument(
        "--top-p", type=float, metavar="X", help="sample from the top tokens with this total probability"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the top N tokens; 0 = all")
    group.add_argument("--min-p", type=float, metavar="X", help="minimum probability relative to the most likely token")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="values above 1 discourage repetition")
    group.add_argument("--seed", type=int, metavar="N", help="random seed; the same seed and prompt give the same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")


def sampling_fields(args: argparse.Namespace) -> dict[str, object]:
    """The fields that were given, checked."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    fields: dict[str, object] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.stop:
        fields["stop"] = list(args.stop)
    check_fields(fields)
    return fields


def check_fields(fields: SamplingFields) -> None:
    """Raises `BadRequest` for a value that is out of range."""
    values: dict[str, Any] = dict(fields)
    SamplingParams(**{**values, "stop": tuple(values.get("stop", ()))})


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Tokens and times of one answer."""

    prompt_tokens: int | None = 0
    """None: the server did not say, as at an answer that was stopped."""
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first over the time after the first."""
        decoding_s = self.total_s - self.first_token_s
        return (self.output_tokens - 1) / decoding_s if self.output_tokens > 1 and decoding_s > 0 else 0.0

    def summary(self) -> str:
        prompt = "unknown number of" if self.prompt_tokens is None else self.prompt_tokens
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        speed = f", then {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{prompt} prompt tokens{cached}, {self.output_tokens} output tokens;"
            f" first token after {self.first_token_s:.2f} s{speed}; finish reason: {self.finish_reason or 'unknown'}"
        )
