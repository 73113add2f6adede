"""The figures of one workload, from the samples of its requests."""

from __future__ import annotations

from millrace.bench.figures import Figure, percentile
from millrace.bench.http.drive import Outcome
from millrace.bench.http.target import Sample


def figures_of(outcome: Outcome) -> list[Figure]:
    """Medians for one-at-a-time workloads; percentiles and totals for concurrent ones."""
    name, good = outcome.workload.name, outcome.good
    note = _note(outcome)
    if not good:
        return [Figure(name, "completed", 0, "requests", len(outcome.samples), note)]
    count = len(good)
    ttft_ms = [1000 * (sample.first_token_at - sample.started_at) for sample in good if sample.chunks]
    tpot_ms = [1000 * t for t in map(_seconds_per_token, good) if t is not None]
    output = sum(sample.output_tokens for sample in good)
    found = [Figure(name, "TTFT p50", percentile(ttft_ms, 50), "ms", count, note)]
    if outcome.workload.concurrency > 1:
        found.append(Figure(name, "TTFT p99", percentile(ttft_ms, 99), "ms", count))
    if tpot_ms and not name.startswith("prefix-"):
        found.append(Figure(name, "TPOT p50", percentile(tpot_ms, 50), "ms", count))
        if outcome.workload.concurrency == 1:
            found.append(Figure(name, "decode", 1000 / percentile(tpot_ms, 50), "tok/s", count))
    if outcome.workload.concurrency > 1:
        found.append(Figure(name, "output", output / outcome.wall_s, "tok/s", count))
        found.append(Figure(name, "wall", outcome.wall_s, "s", count))
    cached = sum(sample.cached_tokens for sample in good)
    if cached:
        found.append(
            Figure(name, "prompt tokens cached", 100 * cached / sum(s.prompt_tokens for s in good), "%", count)
        )
    return found


def _seconds_per_token(sample: Sample) -> float | None:
    if sample.output_tokens < 2 or sample.chunks < 2:
        return None
    return (sample.last_token_at - sample.first_token_at) / (sample.output_tokens - 1)


def _note(outcome: Outcome) -> str:
    """Whatever makes the figures of this workload less reliable."""
    parts = []
    if outcome.errors:
        parts.append(f"{len(outcome.errors)} requests failed, first error: {outcome.errors[0]}")
    if outcome.incomplete:
        parts.append(
            f"{outcome.incomplete} of {len(outcome.workload.shapes)} requests not completed within the time limit"
        )
    wanted = sum(shape.output_tokens for shape in outcome.workload.shapes) / len(outcome.workload.shapes)
    got = sum(sample.output_tokens for sample in outcome.good) / max(len(outcome.good), 1)
    if outcome.good and not outcome.incomplete and not outcome.errors and got < 0.98 * wanted:
        parts.append(f"answers ended early: {got:.0f} tokens on average instead of {wanted:.0f}")
    return "; ".join(parts)
