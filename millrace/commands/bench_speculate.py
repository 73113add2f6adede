"""`millrace bench speculate`: what drafts give on copy-heavy work and on chat, in alternating rounds."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config import Config, LoadedConfig
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.http.speculating import Point

ROUNDS = 4
LEAST = 0.98
"""Drafts may not take more than the rest."""
EXAMPLES = """\
bench speculate:
  millrace bench speculate                                with drafts (auto) against none, 1, 4 and 16 streams
  millrace bench speculate --speculate ngram --draft-tokens 3 --streams 1 --rounds 8 --svg speed-up.svg"""


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if drafts surely cost more than they may at some point."""
    from millrace.bench.http.speculating import STREAMS, SpeculateBench, plot_svg

    rounds = ROUNDS if args.rounds is None else args.rounds
    if not 2 <= rounds <= 100:
        raise UsageError(f"--rounds is {rounds}; it must be from 2 to 100.")
    settings = load_settings(args)
    with tempfile.TemporaryDirectory() as folder:
        bench = SpeculateBench(
            _options(Path(folder), settings),
            _on_options(settings.config),
            streams=tuple(numbers("--streams", args.streams)) if args.streams else STREAMS,
            rounds=rounds,
        )
        line, points = StatusLine(), []
        for point in bench.run(line.show):
            line.clear()
            points.append(point)
            print(json.dumps(_record(point)) if args.json else _line(point), flush=True)
    if args.svg is not None:
        args.svg.write_text(plot_svg(points), encoding="utf-8")
    return int(any(point.speed_up.high < LEAST for point in points))


def _options(folder: Path, settings: LoadedConfig) -> tuple[str, ...]:
    file = folder / "settings.toml"
    file.write_text("\n".join(toml_lines(settings)), encoding="utf-8")
    return ("--config", str(file))


def _on_options(config: Config) -> tuple[str, ...]:
    speculate = config.plan.speculate if config.plan.speculate != "off" else "auto"
    return ("--speculate", speculate)


def _line(point: Point) -> str:
    ratio = point.speed_up
    off, on = (sum(rates) / len(rates) for rates in (point.off, point.on))
    return (
        f"{point.workload:8} {point.streams:3} streams: {off:7.1f} tok/s off, {on:7.1f} on,"
        f" {ratio.value:.2f} × (95% interval {ratio.low:.2f} to {ratio.high:.2f})"
    )


def _record(point: Point) -> dict[str, object]:
    ratio = point.speed_up
    return {
        "case": "speculate",
        "workload": point.workload,
        "streams": point.streams,
        "tokens_per_s_off": [round(rate, 2) for rate in point.off],
        "tokens_per_s_on": [round(rate, 2) for rate in point.on],
        "speed_up": round(ratio.value, 4),
        "interval": [round(ratio.low, 4), round(ratio.high, 4)],
    }
