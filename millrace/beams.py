"""Beam search over log-probabilities, as `transformers` defines it. Pure: no engine, no clock.

`BeamSearch` is told the likeliest next tokens of each live beam, step by step. What runs the model is a collaborator:
`search` asks it for one token of each beam at a time, and the prefix cache makes that cheap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from millrace.errors import BadRequest
from millrace.link.messages import TokenLogprobs
from millrace.params.beams import BeamParams
from millrace.params.sampling import MAX_LOGPROBS, SamplingParams

Expand = Callable[[list[list[int]]], Awaitable[list[TokenLogprobs]]]
"""Output tokens of each live beam -> the likeliest tokens that follow each."""
HasStop = Callable[[Sequence[int]], bool]
"""Whether the text of these output tokens contains a stop string."""


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float = 0.0
    """Sum of log-probabilities; of a finished beam divided by length ** length_penalty."""
    is_stopped: bool = False
    """True if it ended with an end token, false if with the length or a stop string."""

    def finish_reason(self, max_tokens: int) -> Literal["stop", "length"]:
        """Before `max_tokens`, only an end token or a stop string ends a beam."""
        return "stop" if self.is_stopped or len(self.token_ids) < max_tokens else "length"

    def entries(self, num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens, each with the likeliest `num_top`, as the client asked for them."""
        return [
            msgspec.structs.replace(one, top_ids=one.top_ids[:num_top], top_logprobs=one.top_logprobs[:num_top])
            for one in self.logprobs
        ]


class BeamSearch:
    def __init__(
        self,
        params: BeamParams,
        *,
        max_tokens: int,
        end_token_ids: Sequence[int],
        min_tokens: int = 0,
        has_stop: HasStop | None = None,
    ) -> None:
        self._params, self._max_tokens, self._min_tokens = params, max_tokens, min_tokens
        self._ends, self._has_stop = frozenset(end_token_ids), has_stop
        self.live = [Beam()]
        self.finished: list[Beam] = []
        """The best ones so far, best first."""
        self.is_done = False
        self._length = 0

    @property
    def num_wanted(self) -> int:
        """How many next tokens of each beam decide: every beam may supply all live ones, beside the end tokens."""
        return self._params.num_beams + len(self._ends)

    def advance(self, following: Sequence[TokenLogprobs]) -> None:
        """`following`: the likeliest tokens after each live beam, at least `num_wanted` of them."""
        num_beams = self._params.num_beams
        candidates = self._candidates(following)
        self._length += 1
        is_last = self._length == self._max_tokens
        # Only the best candidates may end; the others are there so that enough beams go on.
        ending = [beam for beam in candidates[:num_beams] if is_last or self._ends_with(beam)]
        self.finished = sorted([*self.finished, *map(self._ended, ending)], key=lambda beam: beam.score, reverse=True)[
            :num_beams
        ]
        going_on = (beam for beam in candidates if not self._ends_with(beam))
        self.live = [] if is_last else list(islice(going_on, num_beams))
        self.is_done = not self.live or self._cannot_improve()

    def _candidates(self, following: Sequence[TokenLogprobs]) -> list[Beam]:
        """All continuations, best first; of equals the one of the earlier beam."""
        found = []
        for beam, entry in zip(self.live, following, strict=True):
            for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
                if token in self._ends and self._length < self._min_tokens:
                    continue
                own = TokenLogprobs(token, logprob, rank, entry.top_ids, entry.top_logprobs)
                found.append((beam.score + logprob, beam, own))
        found.sort(key=lambda one: -one[0])
        return [Beam((*beam.token_ids, own.token_id), (*beam.logprobs, own), score) for score, beam, own in found]

    def _ends_with(self, beam: Beam) -> bool:
        """Whether the last token of a continuation ends it."""
        return beam.token_ids[-1] in self._ends or (self._has_stop is not None and self._has_stop(beam.token_ids))

    def _ended(self, beam: Beam) -> Beam:
        score = beam.score / self._length**self._params.length_penalty
        return Beam(beam.token_ids, beam.logprobs, score, beam.token_ids[-1] in self._ends)

    def _cannot_improve(self) -> bool:
        params = self._params
        if len(self.finished) < params.num_beams:
            return False
        if params.early_stopping is True:
            return True
        is_exhaustive = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if is_exhaustive else self._length
        best_possible: float = self.live[0].score / length**params.length_penalty
        return best_possible <= self.finished[-1].score


async def search(
    params: BeamParams,
    expand: Expand,
    *,
    max_tokens: int,
    ends: Sequence[int],
    min_tokens: int,
    has_stop: HasStop | None = None,
) -> list[Beam]:
    """The finished beams, best first."""
    beams = BeamSearch(params, max_tokens=max_tokens, end_token_ids=ends, min_tokens=min_tokens, has_stop=has_stop)
    while not beams.is_done:
        beams.advance(await expand([list(beam.token_ids) for beam in beams.live]))
    return beams.finished


def step_params(params: BeamParams, num_ends: int, logprobs: int | None, adapter: str = "") -> SamplingParams:
    """What asks the engine for the tokens that may follow a beam. `logprobs`: as many as the client wants to see."""
    num_top = max(params.num_beams + num_ends, logprobs or 0)
    return SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_top, ignore_eos=True, adapter=adapter)


def check_beams(params: BeamParams, sampling: SamplingParams, num_ends: int) -> None:
    """Refuse what beams cannot honour: they follow the model's own log-probabilities."""
    if params.num_beams + num_ends > MAX_LOGPROBS:
        raise BadRequest(
            f"num_beams is {params.num_beams}; with {num_ends} end tokens it is at most {MAX_LOGPROBS - num_ends}.",
            param="num_beams",
        )
    if sampling.n > params.num_beams:
        raise BadRequest(
            f"n is {sampling.n}, above num_beams ({params.num_beams}); lower n or raise num_beams.", param="n"
        )
    neutral = SamplingParams()
    for name in (
        *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("typical_p", "top_a", "xtc_probability", "dry_multiplier", "mirostat", "dynatemp_range", "grammar"),
        "prompt_logprobs",
        *("logits_processors", "bad_words", "allowed_token_ids"),
    ):
        if getattr(sampling, name) != getattr(neutral, name):
            raise BadRequest(
                f"{name} cannot be combined with beam search, which follows the model's own probabilities; remove it.",
                param=name,
            )
    if sampling.thinking is not None:
        raise BadRequest(
            "A limit on reasoning cannot be combined with beam search, which follows the model's own probabilities;"
            " remove 'reasoning_effort' or 'thinking_token_budget'.",
            param="reasoning_effort",
        )
    if sampling.temperature not in (0.0, 1.0):
        raise BadRequest(
            f"temperature is {sampling.temperature}, which has no meaning in beam search; remove it.",
            param="temperature",
        )
