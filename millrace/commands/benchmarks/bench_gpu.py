"""`millrace bench gpu`: measures the engine on the shapes and workloads of the recorded peer figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import load_settings
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.gpu.models import GpuModel
    from millrace.bench.gpu.run import GpuOptions

EXAMPLES = """\
bench gpu:
  startup        from the start of the engine process to the first token
  decode         512 in / 128 out, at each batch size: time per step with all rows running
  ttft           TTFT of one new request of 128 to 32,768 tokens
  mixed          256 and 1,024 requests at once, 100–1,024 in / 100–1,024 out
  prefix         512 requests, 2,048 shared + 64 own in / 64 out; and TTFT with a cached prefix
  host           host time per step at batch 256, from the engine's counters
  millrace bench gpu > results.jsonl                     everything, one JSON line per figure
  millrace bench gpu --models llama-3.1-8b+fp8 --cases decode --batches 1,128 --quick
  millrace bench gpu --table results.jsonl               markdown tables with the recorded peer figures
  millrace bench gpu --device cpu --models smollm2-135m --scale 0.05 --batches 1,4   try it without a GPU"""

PROFILE_BATCHES = (1, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench gpu")
    group.add_argument(
        "--models",
        default="",
        metavar="NAMES",
        help="model shapes, names or paths separated by commas; suffixes +fp8, +fp8kv, +fullkv",
    )
    group.add_argument("--shapes", type=Path, metavar="DIR", help="directory of more shapes (config.json files)")
    group.add_argument("--cases", default="", metavar="NAMES", help="startup,decode,ttft,mixed,prefix,host")
    group.add_argument("--batches", default="", metavar="NS", help="decode batch sizes (default: 1,8,32,128,256)")
    group.add_argument("--quick", action="store_true", help="fewer repetitions, without the largest mixed load")
    group.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="scale all sizes by this, to try the command (default: 1)"
    )
    group.add_argument(
        "--profile", action="store_true", help="also profile one decode step by kernel, at batch 1 and 128"
    )
    group.add_argument("--table", type=Path, metavar="FILE", help="print results from FILE as markdown and exit")


def reject_own_options(args: argparse.Namespace, *, allowed: tuple[str, ...] = ()) -> None:
    """Refuse options of `bench gpu` in other benchmarks, except those in `allowed`."""
    for name in ("models", "shapes", "cases", "batches", "quick", "profile", "table"):
        if getattr(args, name) and name not in allowed:
            raise UsageError(f"--{name} is an option of `millrace bench gpu`.")
    if args.scale != 1:
        raise UsageError("--scale is an option of `millrace bench gpu`.")


def run(args: argparse.Namespace) -> int:
    if args.url or args.workloads or args.pid or args.api_key:
        raise UsageError("bench gpu starts its own engines and does not take --url, --workloads, --pid or --api-key.")
    if args.table is not None:
        return _print_table(args.table)
    if not (math.isfinite(args.time_limit) and args.time_limit > 0):
        raise UsageError(f"--time-limit is {args.time_limit:g}; it must be greater than 0.")
    options, reporter = _options(args), Reporter()
    models = chosen_models(args)
    try:
        _measure(args, models, options, reporter)
    finally:
        reporter.finish()
    return 1 if reporter.failures else 0


def _measure(args: argparse.Namespace, models: list[GpuModel], options: GpuOptions, reporter: Reporter) -> None:
    from millrace.bench.gpu.run import run_models

    asyncio.run(run_models(models, options, reporter.add, reporter.progress))
    if args.profile:
        batches = tuple(batch for batch in PROFILE_BATCHES if batch in options.sizes.batches) or options.sizes.batches
        for model in models:
            reporter.progress(f"{model.label}: profiling", 0, 0)
            _profile(model, batches, options, reporter)


def _profile(model: GpuModel, batches: tuple[int, ...], options: GpuOptions, reporter: Reporter) -> None:
    from millrace.bench.gpu.profile import profile_model
    from millrace.bench.gpu.report import profile_table
    from millrace.errors import MillraceError

    try:
        records = profile_model(
            model,
            batches,
            prompt_tokens=options.sizes.decode_prompt,
            seed=options.seed,
            time_limit_s=options.time_limit_s,
        )
    except MillraceError as error:
        reporter.add({"engine": "millrace", "model": model.label, "case": "profile", "error": error.message})
        return
    for record in records:
        reporter.add(record)
        if "kernels" in record:
            print(f"\n{profile_table(record)}\n", file=sys.stderr, flush=True)


def chosen_models(args: argparse.Namespace) -> list[GpuModel]:
    from millrace.bench.gpu.models import DEFAULT_MODELS, known_shapes, make_model

    loaded, shapes = load_settings(args), known_shapes(args.shapes)
    return [make_model(name, loaded, shapes) for name in _names(args.models) or DEFAULT_MODELS]


def _options(args: argparse.Namespace) -> GpuOptions:
    from millrace.bench.gpu.cases import BATCHES, CASES, Sizes
    from millrace.bench.gpu.peer_figures import load_peers
    from millrace.bench.gpu.run import GpuOptions

    if not (math.isfinite(args.scale) and 0 < args.scale <= 1):
        raise UsageError(f"--scale is {args.scale:g}; it must be greater than 0 and at most 1.")
    cases = tuple(_names(args.cases)) or CASES
    for case in cases:
        if case not in CASES:
            raise UsageError(f"Unknown case '{case}'. Cases: {', '.join(CASES)}.")
    sizes = Sizes(batches=_batches(args.batches) or BATCHES)
    whole = args.scale == 1
    return GpuOptions(
        cases=cases,
        sizes=sizes if whole else sizes.scaled(args.scale),
        seed=args.content_seed if args.content_seed is not None else 0,
        quick=args.quick,
        time_limit_s=args.time_limit,
        peers=load_peers() if whole else None,
    )


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _batches(text: str) -> tuple[int, ...]:
    found = []
    for item in _names(text):
        if not item.isdecimal() or not 1 <= int(item) <= 4096:
            raise UsageError(f"--batches has '{item}'; it must be whole numbers from 1 to 4096, such as 1,8,32.")
        found.append(int(item))
    return tuple(found)


def _print_table(path: Path) -> int:
    from millrace.bench.gpu.peer_figures import load_peers
    from millrace.bench.gpu.report import markdown, read_records

    print(markdown(read_records(path), load_peers()), end="")
    return 0


class Reporter:
    """Prints one JSON line per figure to standard output; progress and the table go to standard error."""

    def __init__(self) -> None:
        self._records: list[dict[str, object]] = []
        self._line = StatusLine()
        self.failures = 0

    def add(self, record: dict[str, object]) -> None:
        self._line.clear()
        self._records.append(record)
        self.failures += "error" in record
        print(json.dumps(record, ensure_ascii=False), flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._line.show(what, done, total)

    def finish(self) -> None:
        from millrace.bench.gpu.report import print_terminal_table

        self._line.clear()
        if self._records:
            print_terminal_table(self._records, sys.stderr)
