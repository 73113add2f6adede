"""Sampling options shared by `chat` and `generate`, and how they become parameters."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from millrace.params import SamplingParams

DEFAULT_TEMPERATURE = 0.7


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    group = parser.add_argument_group("the answer")
    shown = "to the end of the context" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens to generate (default: {shown})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=DEFAULT_TEMPERATURE,
        metavar="X",
        help=f"0 always takes the likeliest token (default: {DEFAULT_TEMPERATURE})",
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="keep tokens up to this total probability")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="keep this many likeliest tokens; 0 keeps all")
    group.add_argument("--min-p", type=float, default=0.0, metavar="X", help="drop tokens below this share of the best")
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 discourages repeating"
    )
    group.add_argument("--seed", type=int, metavar="N", help="same seed and prompt, same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")


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
    """The parameters as a request's fields; extensions of OpenAI's own only where they say something."""
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
    """What is worth knowing about the last answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Of the decoding alone: the tokens after the first over the time after the first."""
        decoding_s = self.total_s - self.first_token_s
        return (self.output_tokens - 1) / decoding_s if self.output_tokens > 1 and decoding_s > 0 else 0.0

    def sentence(self) -> str:
        cached = f" ({self.cached_tokens} from the cache)" if self.cached_tokens else ""
        speed = f", then {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{self.prompt_tokens} tokens in{cached}, {self.output_tokens} out;"
            f" first after {self.first_token_s:.2f} s{speed}; ended by {self.finish_reason or 'unknown'}"
        )
