"""The report of simulations: a table of variants, JSON, and one HTML file with plots."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from millrace.load.records import Floats
from millrace.load.svg import Line, plot
from millrace.simulate.profile import Profile
from millrace.simulate.settings import SimulationSettings
from millrace.simulate.simulation import Simulated

VERSION = 1
STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:1360px;margin:2em auto;padding:0 1em;color:#111}"
    "pre{background:#f5f5f5;padding:1em;overflow:auto}.plots{display:flex;flex-wrap:wrap;gap:1em}"
)
MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    settings: SimulationSettings
    result: Simulated
    bounds: tuple[Simulated, Simulated] | None = None
    """The same on a machine faster, and one slower, by the profile's error."""


COLUMNS = (
    ("TTFT p50", "ttft_ms", "p50"),
    ("p99", "ttft_ms", "p99"),
    ("TPOT p50", "tpot_ms", "p50"),
    ("p99", "tpot_ms", "p99"),
    ("ITL p99", "itl_ms", "p99"),
)


def table(variants: Sequence[Variant]) -> str:
    """Times in milliseconds."""
    width = max(len("variant"), *(len(variant.name) for variant in variants))
    heads = [name for name, _, _ in COLUMNS] + [
        "tokens/s",
        "answered/s",
        "goodput/s",
        "failed",
        "hits",
        "preempt",
        "busy",
    ]
    lines = ["  ".join([f"{'variant':<{width}}", *(f"{head:>10}" for head in heads)])]
    for variant in variants:
        lines.append("  ".join([f"{variant.name:<{width}}", *(f"{cell:>10}" for cell in _cells(variant.result))]))
        if variant.bounds is not None:
            for label, bound in zip(("  if faster", "  if slower"), variant.bounds, strict=True):
                lines.append("  ".join([f"{label:<{width}}", *(f"{cell:>10}" for cell in _cells(bound))]))
    return "\n".join(lines)


def _cells(result: Simulated) -> list[str]:
    summary, counts = result.outcome.summary(), result.counts
    times = [summary[metric][percent] if summary[metric] else None for _, metric, percent in COLUMNS]
    return [
        *("-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}" for value in times),
        f"{summary['output_tokens_per_s']['value']:.1f}",
        f"{summary['requests_per_s']['value']:.3f}",
        f"{summary['goodput_per_s']['value']:.3f}",
        str(summary["failed"]),
        f"{100 * counts.hit_share:.1f}%",
        str(counts.preemptions),
        f"{100 * counts.busy_share:.0f}%",
    ]


def notes(profile: Profile, variants: Sequence[Variant]) -> list[str]:
    """What a reader must know of the figures' worth."""
    found = [f"Steps of {profile.model} on {profile.device}: {profile.source}, error {100 * profile.error:.0f}%."]
    if profile.note:
        found.append(f"Profile: {profile.note}.")
    for variant in variants:
        share = variant.result.counts.outside_share
        if share:
            found.append(
                f"{variant.name}: {100 * share:.1f}% of the device time is in steps larger than any measured one; those"
                " are extrapolated."
            )
        for error, count in variant.result.outcome.summary()["errors"].items():
            found.append(f"{variant.name}: {count} × {error}")
        if variant.result.counts.drafts:
            counts = variant.result.counts
            found.append(f"{variant.name}: {counts.accepted:,} of {counts.drafts:,} drafts accepted.")
        if variant.result.counts.loaded_tokens:
            found.append(f"{variant.name}: {variant.result.counts.loaded_tokens:,} tokens loaded from host memory.")
        if variant.result.counts.disk_tokens:
            found.append(f"{variant.name}: {variant.result.counts.disk_tokens:,} tokens read from the disk.")
    return found


def as_json(profile: Profile, workload: dict[str, Any], variants: Sequence[Variant]) -> dict[str, Any]:
    """Plain data that depends on the arguments of the simulation alone."""
    return {
        "object": "simulation.report",
        "version": VERSION,
        "profile": msgspec.to_builtins(profile),
        "workload": workload,
        "variants": [
            {
                "name": variant.name,
                "settings": asdict(variant.settings),
                "summary": variant.result.outcome.summary(),
                "engine": {**asdict(variant.result.counts), "hit_share": variant.result.counts.hit_share},
                "interval": None if variant.bounds is None else [one.outcome.summary() for one in variant.bounds],
            }
            for variant in variants
        ],
    }


def html_page(title: str, text: str, plots: Sequence[str]) -> str:
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f'<h1>{html.escape(title)}</h1><pre>{html.escape(text)}</pre><div class="plots">{"".join(plots)}</div></html>'
    )


def plots(variants: Sequence[Variant]) -> list[str]:
    """Distributions of all variants; queue and KV pool of the first replica over time."""
    found = [
        plot(
            f"{label}: cumulative",
            [_distribution(variant.name, 1e3 * variant.result.outcome.values(metric)) for variant in variants],
            "ms",
            "%",
            log_x=True,
        )
        for metric, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "Inter-token latency"))
    ]
    for label, column in (("Waiting requests", "waiting"), ("Running requests", "running"), ("KV in use", "kv_share")):
        lines = []
        for variant in variants:
            line = variant.result.timelines[0]
            keep = slice(None, None, max(1, len(line.at) // MAX_POINTS))
            lines.append(Line(variant.name, line.at[keep], [float(value) for value in getattr(line, column)[keep]]))
        found.append(plot(f"{label}, replica 0", lines, "s", "share" if column == "kv_share" else "requests"))
    return found


def _distribution(name: str, values: Floats) -> Line:
    if not len(values):
        return Line(name, [], [])
    shares = np.linspace(0, 100, min(200, len(values)))
    return Line(name, np.percentile(values, shares).tolist(), shares.tolist())
