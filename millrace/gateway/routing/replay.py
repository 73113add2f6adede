"""A decision log routed again: the same requests at the same times, by another policy, over a model of the replicas.

A request is outstanding for as long as it was; what a replica was sent stays in its cache. So the figures compare
policies with each other; they do not predict times.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from millrace.errors import ConfigError
from millrace.gateway.routing.decisions import Decision, Outcome, read_log
from millrace.gateway.routing.policies import POLICIES, policy_named
from millrace.gateway.routing.prefix_map import PrefixMap

ASSUMED_S = 10.0
"""Duration of a request without an outcome in the log."""


@dataclass
class ReplayResult:
    policy: str
    num_requests: int = 0
    num_moved: int = 0
    """Requests that went to another replica than in the log."""
    prompt_tokens: int = 0
    matched_tokens: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    """Tokens of work by replica."""
    first_s: list[float] = field(default_factory=list)
    """Modelled time to the first token of each request: a replica computes one prompt after the other."""

    @property
    def hit_rate(self) -> float:
        return self.matched_tokens / max(1, self.prompt_tokens)

    @property
    def balance(self) -> float:
        """Work of the busiest replica over the mean; 1 is perfect."""
        return max(self.sent.values(), default=0) * len(self.sent) / max(1, self.sent.total())


def replay_log(path: Path, policy: str | None = None, max_chunks: int | None = None) -> list[ReplayResult]:
    """One policy, or all of them."""
    entries = list(read_log(path))
    decisions = [one for one in entries if isinstance(one, Decision) and one.attempt == 0]
    if not decisions:
        raise ConfigError(f"{path} has no decisions.", param="log")
    lasted = {one.id: one.total_s for one in entries if isinstance(one, Outcome)}
    names = [policy] if policy else list(POLICIES)
    return [replay(decisions, lasted, name, max_chunks) for name in names]


def replay(
    decisions: list[Decision],
    lasted: dict[str, float],
    policy: str,
    max_chunks: int | None = None,
    prompt_s: float = 0.0,
) -> ReplayResult:
    """`max_chunks`: how much of its prompts a replica keeps; by default everything. `prompt_s`: modelled seconds per
    prompt token that is not cached."""
    chooser, result = policy_named(policy), ReplayResult(policy)
    prefixes = PrefixMap(max_chunks) if max_chunks is not None else PrefixMap()
    outstanding: Counter[str] = Counter()
    ends: list[tuple[float, str, int]] = []
    free_at: dict[str, float] = {}
    for turn, decision in enumerate(decisions):
        asked = decision.asked
        while ends and ends[0][0] <= decision.at:
            _, name, work = heapq.heappop(ends)
            outstanding[name] -= work
        candidates = tuple(
            msgspec.structs.replace(
                one,
                outstanding_tokens=outstanding[one.name],
                matched_tokens=min(asked.prompt_tokens, prefixes.matched_tokens(one.name, asked.chain)),
            )
            for one in decision.candidates
        )
        for one in candidates:
            result.sent[one.name] += 0
        choice = chooser.choose(asked, candidates, msgspec.structs.replace(decision.moment, turn=turn))
        matched = next(one.matched_tokens for one in candidates if one.name == choice.replica)
        prefixes.sent_to(choice.replica, asked.chain)
        begins = max(decision.at, free_at.get(choice.replica, 0.0))
        free_at[choice.replica] = begins + (asked.prompt_tokens - matched) * prompt_s
        result.first_s.append(free_at[choice.replica] - decision.at)
        work = asked.prompt_tokens - matched + asked.output_tokens
        outstanding[choice.replica] += work
        heapq.heappush(ends, (decision.at + lasted.get(asked.id, ASSUMED_S), choice.replica, work))
        result.num_requests += 1
        result.num_moved += choice.replica != decision.choice.replica
        result.prompt_tokens += asked.prompt_tokens
        result.matched_tokens += matched
        result.sent[choice.replica] += work
    return result
