"""`millrace bench speculate`: what drafts give on copy-heavy work and on chat, in alternating rounds; with `--models`
on GPU shapes, with drafts that are right as often as wanted."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.config import Config, LoadedConfig
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.gpu.speculating import SweepPoint
    from millrace.bench.http.speculating import Point

LEAST = 0.98
"""Drafts may not take more than the rest."""
EXAMPLES = """\
bench speculate:
  millrace bench speculate                                with drafts (auto) against none, 1, 4 and 16 streams: five
                                                          minutes; narrower intervals with --seconds 1200
  millrace bench speculate --speculate ngram --draft-tokens 3 --streams 1 --rounds 8 --svg speed-up.svg
  millrace bench speculate --drafter ./my-drafter --workloads chat --streams 1      text and a trained drafter (auto)
  millrace bench speculate --models llama-3.1-8b          a GPU shape: off, auto and fixed numbers of drafts, right with
                                                          a given probability; --batches 1,32 --acceptance 0,0.8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("bench speculate").add_argument(
        "--acceptance", default="", metavar="P,…", help="with --models: how often drafts are right (default: 0,0.6,0.8)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if drafts surely cost more than they may at some point."""
    if args.models:
        return asyncio.run(_run_sweep(args))
    if args.acceptance:
        raise UsageError("--acceptance needs --models: on a GPU shape, drafts are replayed.")
    from millrace.bench.http.speculating import SECONDS, STREAMS, SpeculateBench, plot_svg

    if args.rounds is not None and not 2 <= args.rounds <= 100:
        raise UsageError(f"--rounds is {args.rounds}; it must be from 2 to 100.")
    settings = load_settings(args)
    with tempfile.TemporaryDirectory() as folder:
        bench = SpeculateBench(
            _options(Path(folder), settings),
            _on_options(settings.config),
            streams=tuple(numbers("--streams", args.streams)) if args.streams else STREAMS,
            workloads=chosen_workloads(args.workloads),
            rounds=args.rounds or 0,
            seconds=args.seconds or SECONDS,
        )
        line, points = StatusLine(), []
        for point in bench.run(line.show):
            line.clear()
            points.append(point)
            print(json.dumps(_record(point)) if args.json else _line(point), flush=True)
    if args.svg is not None:
        args.svg.write_text(plot_svg(points), encoding="utf-8")
    return int(any(point.speed_up.high < LEAST for point in points))


async def _run_sweep(args: argparse.Namespace) -> int:
    from millrace.bench.gpu.models import known_shapes, make_model
    from millrace.bench.gpu.speculating import Sweep, SweepSizes

    sizes = SweepSizes(rounds=2 if args.rounds is None else args.rounds, output=2 * args.tokens)
    if args.batches:
        sizes = replace(sizes, batches=tuple(numbers("--batches", args.batches)))
    if args.acceptance:
        sizes = replace(sizes, acceptances=_shares(args.acceptance))
    loaded, shapes, failed = load_settings(args), known_shapes(args.shapes), False
    for name in dict.fromkeys(args.models.split(",")):
        model, line = make_model(name, loaded, shapes), StatusLine()
        sweep = Sweep(model, sizes, seed=args.content_seed or 0, time_limit_s=args.time_limit)
        async for point in sweep.run(line.show):
            line.clear()
            failed = failed or bool(point.failures)
            print(json.dumps(_sweep_record(model.label, point)) if args.json else _sweep_line(point), flush=True)
    return int(failed)


def chosen_workloads(text: str) -> tuple[str, ...]:
    from millrace.bench.http.speculating import WORKLOADS

    found = tuple(dict.fromkeys(text.split(","))) if text else WORKLOADS
    unknown = [name for name in found if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"--workloads names {unknown[0]!r}; it must be some of {', '.join(WORKLOADS)}.")
    return found


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(item) for item in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= share <= 1 for share in found):
        raise UsageError(f"--acceptance is {text}; it must be numbers from 0 to 1, such as 0,0.6,0.8.")
    return found


def _sweep_line(point: SweepPoint) -> str:
    off = sum(point.rates["off"]) / len(point.rates["off"])
    ratios = ", ".join(f"{name} {point.ratio(name):.3f} ×" for name in point.rates if name != "off")
    equal = min(point.equal.values())
    failures = "".join(f"; {failure}" for failure in point.failures)
    return (
        f"{point.batch:4} at once, acceptance {point.acceptance:g}: {off:8.1f} tok/s off; {ratios}"
        f" ({equal:.1%} of the tokens equal){failures}"
    )


def _sweep_record(label: str, point: SweepPoint) -> dict[str, object]:
    return {
        "case": "speculate",
        "model": label,
        "batch": point.batch,
        "acceptance": point.acceptance,
        "tokens_per_s": {name: [round(rate, 1) for rate in rates] for name, rates in point.rates.items()},
        "ratio": {name: round(point.ratio(name), 4) for name in point.rates},
        "equal": {name: round(share, 4) for name, share in point.equal.items()},
        "failures": point.failures,
    }


def _options(folder: Path, settings: LoadedConfig) -> tuple[str, ...]:
    file = folder / "settings.toml"
    file.write_text("\n".join(toml_lines(settings)), encoding="utf-8")
    return ("--config", str(file))


def _on_options(config: Config) -> tuple[str, ...]:
    speculate = config.plan.speculate if config.plan.speculate != "off" else "auto"
    return ("--speculate", speculate)


def _line(point: Point) -> str:
    ratio, cpu = point.speed_up, point.cpu_ratio
    off, on = (sum(side.tokens_per_s for side in sides) / len(sides) for sides in (point.off, point.on))
    return (
        f"{point.workload:8} {point.streams:3} streams: {off:7.1f} tok/s off, {on:7.1f} on,"
        f" {ratio.value:.3f} × (95% interval {ratio.low:.3f} to {ratio.high:.3f}, {len(point.off)} rounds);"
        f" CPU time per token {cpu.value:.3f} × ({cpu.low:.3f} to {cpu.high:.3f})"
    )


def _record(point: Point) -> dict[str, object]:
    ratio, cpu = point.speed_up, point.cpu_ratio
    return {
        "case": "speculate",
        "workload": point.workload,
        "streams": point.streams,
        "tokens_per_s_off": [round(side.tokens_per_s, 2) for side in point.off],
        "tokens_per_s_on": [round(side.tokens_per_s, 2) for side in point.on],
        "speed_up": round(ratio.value, 4),
        "interval": [round(ratio.low, 4), round(ratio.high, 4)],
        "cpu_ms_per_token_off": [round(1e3 * side.cpu_s, 3) for side in point.off],
        "cpu_ms_per_token_on": [round(1e3 * side.cpu_s, 3) for side in point.on],
        "cpu_ratio": round(cpu.value, 4),
        "cpu_interval": [round(cpu.low, 4), round(cpu.high, 4)],
    }
