"""`millrace bench serve`: one server with default settings under 8 to 8,192 open streams."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.http.serving import ServingFigures
    from millrace.bench.http.stack_samples import HotFunctions
    from millrace.config import LoadedConfig

SHAPE = "smollm2-135m"
STREAMS = "8,64,512,2048,8192"
SECONDS, CLIENTS = 10.0, 6
EXAMPLES = """\
bench serve:
  millrace bench serve                                   default settings, random weights in the shape of
                                                         SmolLM2-135M, 8 to 8,192 streams from 6 processes
  millrace bench serve --profile-at 512,2048             also profile engine and fronts (needs py-spy)
  millrace bench serve --export DIR                      write shape, tokenizer and template to DIR; measure nothing
  millrace bench serve --model random:DIR                serve the exported model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench serve (also --streams, --tokens, --seconds and --clients)")
    group.add_argument("--export", type=Path, metavar="DIR", help="write the model to DIR and exit")
    group.add_argument("--profile-at", default="", metavar="N,…", help="profile the server at these numbers of streams")
    group.add_argument(
        "--warm-up-s", type=float, default=3.0, metavar="X", help="warm-up before each measurement (default: 3)"
    )


def reject_own_options(args: argparse.Namespace) -> None:
    for name in ("export", "profile_at"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is an option of `millrace bench serve`.")


def run(args: argparse.Namespace) -> int:
    if args.url or args.workloads or args.pid or args.fronts or args.profile:
        raise UsageError(
            "bench serve starts its own server and does not take --url, --workloads, --pid, --fronts or --profile."
            " Use --server.fronts and --profile-at."
        )
    loaded = load_settings(args)
    if args.export is not None:
        _export(args.export)
        print(f"Wrote {args.export}. Next: millrace bench serve --model random:{args.export}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options = server_options(Path(folder), loaded)
        return _measure(args, options)


def _export(folder: Path) -> None:
    from millrace.bench.gpu.models import SHAPES_DIR
    from millrace.bench.http.shape_model import write_shape_model
    from millrace.config import DEFAULT_MODEL

    write_shape_model(folder, SHAPES_DIR / f"{SHAPE}.json", DEFAULT_MODEL)


def server_options(folder: Path, loaded: LoadedConfig) -> tuple[str, ...]:
    """The user's settings, and the benchmark's own model unless another was given."""
    file = folder / "settings.toml"
    file.write_text("\n".join(toml_lines(loaded)), encoding="utf-8")
    options = ("--config", str(file))
    if loaded.sources["model.source"] != "default":
        return options
    _export(folder / SHAPE)
    return (*options, "--model", f"random:{folder / SHAPE}")


def _measure(args: argparse.Namespace, options: tuple[str, ...]) -> int:
    from millrace.bench.http.serving import ServeBench

    streams = tuple(numbers("--streams", args.streams or STREAMS))
    bench = ServeBench(
        options,
        streams,
        tokens=args.tokens,
        seconds=args.seconds or SECONDS,
        warm_up_s=args.warm_up_s,
        clients=args.clients or CLIENTS,
        profiled=tuple(numbers("--profile-at", args.profile_at)) if args.profile_at else (),
    )
    line, found = StatusLine(), []
    for figures in bench.run(line.show):
        line.clear()
        found.append(figures)
        print(json.dumps(figures.record(), ensure_ascii=False), flush=True)
        for name, hot in figures.hot.items():
            _print_hot(f"{name} at {figures.streams:,} streams", hot)
    line.clear()
    _print_table(found)
    return 1 if any(figures.errors for figures in found) else 0


def _print_hot(title: str, hot: HotFunctions) -> None:
    print(f"-- {title}: {hot.samples} samples {hot.problem}", file=sys.stderr)
    for own, whole in itertools.zip_longest(hot.own, hot.all, fillvalue=("", 0.0)):
        texts = (f"{100 * share:5.1f}% {name[-60:]:60}" if name else " " * 67 for name, share in (own, whole))
        print("  ", *texts, file=sys.stderr)


def _print_table(found: list[ServingFigures]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="millrace serve under open streams", title_justify="left", title_style="bold")
    for column in (
        "streams", "req/s", "tok/s", "TTFT p50/p99 ms", "burst p50/p99 ms", "ITL p50/p99 ms", "errors",
        "step ms", "host ms", "tok/step", "run/wait", "cores: engine, fronts, clients",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for one in found:
        cores = [one.cores.get("engine", 0.0), *(v for k, v in one.cores.items() if k.startswith("front"))]
        table.add_row(
            f"{one.streams:,}",
            f"{one.requests_per_s:.1f}",
            f"{one.output_tokens_per_s:,.0f}",
            f"{one.ttft_p50_ms:.0f} / {one.ttft_p99_ms:.0f}",
            f"{one.burst_ttft_p50_ms:.0f} / {one.burst_ttft_p99_ms:.0f}",
            f"{one.itl_p50_ms:.1f} / {one.itl_p99_ms:.1f}",
            str(one.errors),
            f"{one.step_ms:.2f}",
            f"{one.host_ms:.2f}",
            f"{one.tokens_per_step:.0f}",
            f"{one.running:.0f}/{one.waiting:.0f}",
            " ".join(f"{value:.2f}" for value in (*cores, one.cores["clients"])),
        )
    Console(stderr=True, width=None if sys.stderr.isatty() else 200).print(table)
