"""Routing policies on the same traffic, replayed: what they find in caches, how they balance, how long prompts wait."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.bench.gateway.null_replica import MODEL
from millrace.gateway.routing.candidates import CHUNK_TOKENS, Asked, Candidate, Choice, Moment
from millrace.gateway.routing.decisions import Decision
from millrace.gateway.routing.policies import POLICIES
from millrace.gateway.routing.replay import replay

CACHED_TOKENS = 160_000
"""Prompt tokens that a replica keeps, for made-up conversations."""
TRACE_CACHED_TOKENS = 2_000_000
PROMPT_TOKENS_PER_S, TRACE_PROMPT_TOKENS_PER_S = 5000.0, 20_000.0
"""Speed at which a replica computes prompts."""
_TRACE_BLOCK = 512
_OUTPUT_S = 0.008
HITS, BALANCE = "prompt tokens cached", "busiest replica over mean"
FIRST_P50, FIRST_P99 = "first token p50, modelled", "first token p99, modelled"


def conversations(num_replicas: int, num_requests: int, seed: int = 0) -> list[Decision]:
    """Made-up traffic: conversations of several turns that begin with one of a few system prompts. Each turn sends all
    that was said before."""
    draw, found = random.Random(seed), []
    open_ones: list[list[str]] = []
    candidates = tuple(Candidate(f"r{number}") for number in range(num_replicas))
    now = 0.0
    for number in range(num_requests):
        now += draw.expovariate(40.0)
        if len(open_ones) < 60 or draw.random() < 0.15:
            system = draw.choices(range(8), weights=[1 / (rank + 1) for rank in range(8)])[0]
            open_ones.append([f"system {system} {chunk}" for chunk in range(24)])
        chain = draw.choice(open_ones)
        chain += [f"turn {number} {chunk}" for chunk in range(draw.randint(1, 12))]
        asked = Asked(f"{number}", MODEL, len(chain) * CHUNK_TOKENS, draw.randint(16, 256), tuple(chain))
        moment = Moment(number, draw.random())
        found.append(Decision(now, "", asked, moment, candidates, Choice("", "")))
        if len(chain) > 160:
            open_ones.remove(chain)
    return found


class _TraceLine(msgspec.Struct):
    """A line of Mooncake's published traces."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One per 512 tokens; equal ids mean an equal prefix."""


def read_trace(path: Path, num_replicas: int) -> list[Decision]:
    candidates = tuple(Candidate(f"r{number}") for number in range(num_replicas))
    draw, found = random.Random(0), []
    per_id = _TRACE_BLOCK // CHUNK_TOKENS
    try:
        lines = [msgspec.json.decode(line, type=_TraceLine) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise BenchError(f"Cannot read {path}: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not a trace of Mooncake's form: {error}") from error
    for number, line in enumerate(lines):
        chain = tuple(f"{one}.{part}" for one in line.hash_ids for part in range(per_id))
        asked = Asked(f"{number}", MODEL, line.input_length, line.output_length, chain)
        found.append(
            Decision(line.timestamp / 1e3, "", asked, Moment(number, draw.random()), candidates, Choice("", ""))
        )
    return found


def policy_figures(decisions: list[Decision], cached_tokens: int, prompt_tokens_per_s: float) -> Iterator[Figure]:
    """Each policy on the same traffic. A replica keeps `cached_tokens` of prompts, computes one prompt after the other
    and takes 8 ms per token of output."""
    prompt_s = 1 / prompt_tokens_per_s
    lasted = {
        one.asked.id: one.asked.output_tokens * _OUTPUT_S + one.asked.prompt_tokens * prompt_s for one in decisions
    }
    for policy in POLICIES:
        if policy in ("session", "model", "nearest"):  # This traffic names no sessions, models or regions.
            continue
        result = replay(decisions, lasted, policy, cached_tokens // CHUNK_TOKENS, prompt_s)
        count = result.num_requests
        yield Figure(policy, HITS, 100 * result.hit_rate, "%", count)
        yield Figure(policy, BALANCE, result.balance, "×", count)
        yield Figure(policy, FIRST_P50, percentile(result.first_s, 50), "s", count)
        yield Figure(policy, FIRST_P99, percentile(result.first_s, 99), "s", count)


def plot(figures: Sequence[Figure], title: str) -> str:
    """Hit rate and modelled p99 of the time to the first token by policy, as bars in an SVG."""
    panels = [(HITS, "%"), (FIRST_P99, " s")]
    policies = list(dict.fromkeys(one.workload for one in figures if one.metric == HITS))
    row, left, width = 28, 120, 260
    height = 70 + row * len(policies)
    parts = [f'<text x="10" y="22" font-weight="bold">{escape(title)}</text>']
    for number, policy in enumerate(policies):
        parts.append(f'<text x="10" y="{74 + number * row}">{escape(policy)}</text>')
    for panel, (metric, unit) in enumerate(panels):
        start = left + panel * (width + 90)
        values = {one.workload: one.value for one in figures if one.metric == metric}
        most = max(values.values(), default=0.0) or 1.0
        parts.append(f'<text x="{start}" y="46" fill="#555">{escape(metric)}</text>')
        for number, policy in enumerate(policies):
            value, top = values.get(policy, 0.0), 60 + number * row
            length = max(1.0, width * value / most)
            colour = "#1f6feb" if policy == "prefix" else "#8fb5ee"
            parts.append(f'<rect x="{start}" y="{top}" width="{length:.1f}" height="18" fill="{colour}"/>')
            parts.append(f'<text x="{start + length + 6:.1f}" y="{top + 14}">{value:.3g}{unit}</text>')
    across = left + 2 * (width + 90)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {height}" font-family="sans-serif"'
        f' font-size="13"><rect width="{across}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )
