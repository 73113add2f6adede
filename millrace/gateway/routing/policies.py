"""Routing policies, each a pure decision: a request, the candidates and the moment in, a choice and its reason out."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from millrace.errors import ConfigError
from millrace.gateway.routing.candidates import Asked, Candidate, Choice, Moment

MISSING_WEIGHT = 2
ASSUMED_TOKENS_PER_S = 1000.0
"""Where no replica has reported a speed."""
SPILL_TOKENS = 8192
"""A preferred replica is passed over if it has this many more outstanding tokens than the least loaded one."""


class Policy(Protocol):
    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        """`candidates` is not empty, and in the same order for every decision of a fleet."""


class RoundRobin:
    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        return Choice(candidates[moment.turn % len(candidates)].name, f"turn {moment.turn}")


class LeastTokens:
    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        best = _least_loaded(candidates, moment)
        return Choice(best.name, f"fewest outstanding tokens: {best.outstanding_tokens} at weight {best.weight:.3g}")


class PowerOfTwo:
    """The less loaded of two drawn at random: near the best balance even if the view of the load is old."""

    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        count = len(candidates)
        if count == 1:
            return Choice(candidates[0].name, "the only candidate")
        pair = int(moment.draw * count * (count - 1))
        first, second = divmod(pair, count - 1)
        one, other = candidates[first], candidates[second + (second >= first)]
        best, worse = (one, other) if one.load <= other.load else (other, one)
        return Choice(
            best.name,
            f"{best.outstanding_tokens} outstanding tokens against {worse.outstanding_tokens} of {worse.name}",
        )


class Weighted:
    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        left = moment.draw * sum(one.weight for one in candidates)
        for one in candidates:
            left -= one.weight
            if left < 0:
                return Choice(one.name, f"drawn with weight {one.weight:.3g}")
        return Choice(candidates[-1].name, f"drawn with weight {candidates[-1].weight:.3g}")


class PrefixAware:
    """Least work: what is outstanding, and tokens of the prompt that are not cached there. These count twice, as they
    delay others too: equal prompts that come together wait for one computation instead of repeating it. A popular
    prefix spreads once its replica has more outstanding than that, or than fetching it from there costs."""

    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        def work(one: Candidate) -> float:
            missing = one.missing_work(asked.prompt_tokens, MISSING_WEIGHT)
            return (one.outstanding_tokens + missing) / one.weight

        best = min(_rotated(candidates, moment), key=work)
        return Choice(
            best.name,
            f"{best.matched_tokens} of {asked.prompt_tokens} prompt tokens cached,{_fetch_words(best)}"
            f" {best.outstanding_tokens} outstanding; work {work(best):.0f}",
        )


class LeastTime:
    """Soonest done: outstanding tokens and those of this request that are not cached, at the speed that each replica
    reports. Replicas of different machines need no weights."""

    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        known = [one.tokens_per_s for one in candidates if one.tokens_per_s > 0]
        assumed = sum(known) / len(known) if known else ASSUMED_TOKENS_PER_S

        def seconds(one: Candidate) -> float:
            own = one.missing_work(asked.prompt_tokens, 1.0) + asked.output_tokens
            return (one.outstanding_tokens + own) / ((one.tokens_per_s or assumed) * one.weight)

        best = min(_rotated(candidates, moment), key=seconds)
        speed = f"{best.tokens_per_s:.0f} tokens/s" if best.tokens_per_s else "a speed that it has not measured yet"
        return Choice(
            best.name,
            f"done in {seconds(best):.2f} s at {speed},{_fetch_words(best)} {best.outstanding_tokens} outstanding",
        )


class SessionSticky:
    """Requests of a session go to one replica as long as it is there; only its share moves when a replica comes or
    goes (rendezvous hashing)."""

    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        if not asked.session:
            return LeastTokens().choose(asked, candidates, moment)

        def rank(one: Candidate) -> bytes:
            return blake2b(f"{asked.session}\0{one.name}".encode(), digest_size=8).digest()

        return Choice(max(candidates, key=rank).name, f"session {asked.session[:40]!r}")


class ModelAware:
    """Replicas that have the model loaded come before those that would have to load it."""

    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        loaded = [one for one in candidates if one.has_model]
        choice = LeastTokens().choose(asked, loaded or candidates, moment)
        return Choice(choice.replica, f"{'has' if loaded else 'must load'} the model; {choice.reason}")


class Nearest:
    """The gateway's own region, unless it is `SPILL_TOKENS` busier than the rest."""

    def choose(self, asked: Asked, candidates: Sequence[Candidate], moment: Moment) -> Choice:
        near = [one for one in candidates if one.region == moment.region]
        best = _least_loaded(candidates, moment)
        if not near:
            return Choice(best.name, f"no replica in region {moment.region!r}")
        nearest = _least_loaded(near, moment)
        if nearest.load > best.load + SPILL_TOKENS:
            return Choice(
                best.name, f"region {moment.region!r} is busy: {nearest.outstanding_tokens} outstanding tokens"
            )
        return Choice(nearest.name, f"region {moment.region!r}")


def _fetch_words(one: Candidate) -> str:
    return f" {one.fetch_tokens} to fetch at {one.fetch_tokens_per_s:.0f} tokens/s," if one.fetch_tokens else ""


def _rotated(candidates: Sequence[Candidate], moment: Moment) -> list[Candidate]:
    """Equally good candidates take turns: `min` takes the first."""
    start = moment.turn % len(candidates)
    return [*candidates[start:], *candidates[:start]]


def _least_loaded(candidates: Sequence[Candidate], moment: Moment) -> Candidate:
    return min(_rotated(candidates, moment), key=lambda one: one.load)


POLICIES: dict[str, type[Policy]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "power-of-two": PowerOfTwo,
    "weighted": Weighted,
    "prefix": PrefixAware,
    "least-time": LeastTime,
    "session": SessionSticky,
    "model": ModelAware,
    "nearest": Nearest,
}


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"There is no policy {name!r}; it must be one of {', '.join(POLICIES)}.", param="policy")
    return POLICIES[name]()
