"""The sampling options of `chat` and `generate`, as `SamplingParams` and as fields of a request."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from millrace.params import SamplingParams

DEFAULT_TEMPERATURE = 0.7


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    shown = "up to the context limit" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"maximum output tokens (default: {shown})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=DEFAULT_TEMPERATURE,
        metavar="X",
        help=f"randomness; 0 = greedy (default: {DEFAULT_TEMPERATURE})",
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="sample from the top tokens with this total probability"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the top N tokens; 0 = all")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="X", help="minimum probability relative to the most likely token"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="values above 1 discourage repetition"
    )
    group.add_argument("--seed", type=int, metavar="N", help="random seed; the same seed and prompt give the same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )


def openai_fields(params: SamplingParams) -> dict[str, object]:
    """The parameters as request fields. Those at their neutral value are left out, for servers without extensions."""
    fields: dict[str, object] = {"temperature": params.temperature}
    optional: tuple[tuple[str, object, object], ...] = (
        ("max_tokens", params.max_tokens, None),
        ("top_p", params.top_p, 1.0),
        ("top_k", params.top_k, 0),
        ("min_p", params.min_p, 0.0),
        ("repetition_penalty", params.repetition_penalty, 1.0),
        ("seed", params.seed, None),
        ("stop", list(params.stop), []),
    )
    fields.update({name: value for name, value, neutral in optional if value != neutral})
    return fields


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Tokens and times of one answer."""

    prompt_tokens: int = 0
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
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        speed = f", then {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{self.prompt_tokens} prompt tokens{cached}, {self.output_tokens} output tokens;"
            f" first token after {self.first_token_s:.2f} s{speed}; finish reason: {self.finish_reason or 'unknown'}"
        )
