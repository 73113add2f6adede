"""`millrace load`: sends a workload to a server and reports latencies, goodput and the bottleneck."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.load.client import Endpoint
    from millrace.load.processes import Pattern
    from millrace.load.records import Outcome
    from millrace.load.run import Progress
    from millrace.load.sources import TracedRequest
    from millrace.load.sweep import Point, Sweep
    from millrace.load.workload import Workload

USAGE = "millrace load [--url URL] [--rate X | --concurrency N | --trace FILE] [options]"
EXAMPLES = """\
Latencies count from the time at which a request was due, so a server that stalls cannot hide it.

examples:
  millrace load --rate 4 --seconds 60                           Poisson arrivals, 4 requests/s
  millrace load --rate 4 --arrivals gamma --burstiness 3        the same in bursts
  millrace load --concurrency 64 --prompt lognormal:400:0.8     64 clients without pauses
  millrace load --trace azure-conv.csv --speed 10               a trace, ten times as fast
  millrace load --sweep --slo "ttft p95 < 500 ms"               the highest rate that meets it
  millrace load --rate 4 --json a.json --html a.html            write reports
  millrace load --compare a.json b.json                         compare two reports"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="any OpenAI-compatible server")
    server.add_argument("--model", default="", metavar="NAME", help="model (default: the first that it lists)")
    server.add_argument("--api-key", default="", metavar="KEY", help="API key")
    when = parser.add_argument_group("when requests are sent")
    when.add_argument("--rate", type=float, metavar="X", help="open loop: requests per second")
    when.add_argument("--arrivals", default="poisson", choices=("poisson", "gamma", "constant"), help="of an open loop")
    when.add_argument("--burstiness", type=float, default=3.0, metavar="X", help="of gamma: 1 = Poisson (default: 3)")
    when.add_argument("--concurrency", type=int, metavar="N", help="closed loop: clients without pauses")
    when.add_argument("--trace", type=Path, metavar="FILE", help="replay timestamps and lengths (CSV or JSON lines)")
    when.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the trace (default: 1)")
    when.add_argument("--seconds", type=float, default=30.0, metavar="X", help="measured time (default: 30)")
    when.add_argument("--warmup", type=float, default=5.0, metavar="X", help="seconds not counted before (default: 5)")
    what = parser.add_argument_group("what is sent")
    what.add_argument("--prompt", default="lognormal:128:0.6", metavar="LENGTHS", help="prompt tokens of a turn")
    what.add_argument("--output", default="64", metavar="LENGTHS", help="output tokens of a turn (default: 64)")
    what.add_argument("--dataset", type=Path, metavar="FILE", help="prompts from JSON or JSON lines")
    what.add_argument("--turns", type=int, default=1, metavar="N", help="turns per conversation (default: 1)")
    what.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens of a prefix that requests share")
    what.add_argument("--prefixes", type=int, default=1, metavar="N", help="number of such prefixes (default: 1)")
    what.add_argument("--schemas", type=Path, metavar="PATH", help="JSON schemas (a file or directory) to answer by")
    what.add_argument("--models", default="", metavar="NAMES", help="several models or adapters, taken in turn")
    what.add_argument("--priority", default="", metavar="CLASS", help="priority class of the requests")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    how = parser.add_argument_group("how it is judged")
    how.add_argument("--slo", action="append", default=[], metavar="TEXT", help='such as "ttft p95 < 500 ms"; repeat')
    how.add_argument("--sweep", action="store_true", help="find the highest rate that meets the objectives")
    how.add_argument("--precision", type=float, default=0.1, metavar="X", help="of the sweep (default: 0.1)")
    how.add_argument("--processes", type=int, default=1, metavar="N", help="client processes (default: 1)")
    how.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    how.add_argument("--html", type=Path, metavar="FILE", help="write the report as HTML")
    how.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two JSON reports")


def run(args: argparse.Namespace) -> int:
    if args.compare:
        from millrace.load.report import compare, read_report

        print(compare(*(read_report(path) for path in args.compare)))
        return 0
    _check(args)
    from millrace.serve.app import allow_many_connections

    allow_many_connections()
    return asyncio.run(_run(args))


def _check(args: argparse.Namespace) -> None:
    chosen = [name for name in ("rate", "concurrency", "trace") if getattr(args, name) is not None]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other; give one.")
    if args.sweep and (args.concurrency or args.trace):
        raise UsageError("--sweep searches for a rate; leave --concurrency and --trace out.")
    if args.sweep and not args.slo:
        raise UsageError('--sweep needs at least one objective, such as --slo "ttft p95 < 500 ms".')
    positive = {"rate": args.rate, "concurrency": args.concurrency, "seconds": args.seconds, "speed": args.speed}
    for name, value in {**positive, "turns": args.turns, "processes": args.processes}.items():
        if value is not None and value <= 0:
            raise UsageError(f"--{name} is {value:g}; it must be above 0.")
    if args.warmup < 0:
        raise UsageError(f"--warmup is {args.warmup:g}; it must be 0 or more.")
    if not chosen:
        args.rate = 1.0


async def _run(args: argparse.Namespace) -> int:
    from millrace.load.client import Endpoint, probe

    endpoint = await probe(Endpoint(args.url.rstrip("/"), args.model, args.api_key))
    workload = _workload(args)
    if args.sweep:
        return await _sweep(args, endpoint, workload)
    outcome, server = await _measure(args, endpoint, workload, args.rate)
    if not outcome.records:
        raise UsageError(
            f"No request was due in the measured {outcome.seconds:g} s"
            f"{': the clients still waited for those of the warm-up' if args.concurrency else ''}."
            f" Set --seconds to more than {args.seconds:g}."
        )
    cause = _bottleneck(outcome, server)
    _write(args, endpoint, outcome, cause, server, None)
    return 0 if all(outcome.meets(objective) for objective in outcome.objectives) else 1


def _workload(args: argparse.Namespace) -> Workload:
    from millrace.load.lengths import parse_lengths
    from millrace.load.sources import read_dataset, read_schemas
    from millrace.load.workload import Workload, WorkloadSettings

    return Workload(
        WorkloadSettings(
            prompt=parse_lengths(args.prompt, "--prompt"),
            output=parse_lengths(args.output, "--output"),
            turns=args.turns,
            prefix_tokens=args.prefix,
            num_prefixes=max(1, args.prefixes),
            dataset=tuple(read_dataset(args.dataset)) if args.dataset else (),
            schemas=tuple(read_schemas(args.schemas)) if args.schemas else (),
            models=tuple(name.strip() for name in args.models.split(",") if name.strip()),
            priority=args.priority,
            seed=args.seed,
        )
    )


def _pattern(args: argparse.Namespace, rate: float | None) -> Pattern:
    import numpy as np

    from millrace.load.arrivals import arrival_times
    from millrace.load.processes import Pattern
    from millrace.load.sources import read_trace

    duration_s = args.warmup + args.seconds
    if args.concurrency:
        return Pattern(duration_s, concurrency=args.concurrency)
    if args.trace:
        return _traced(args, read_trace(args.trace), duration_s)
    rng = np.random.default_rng(args.seed)
    times = arrival_times(args.arrivals, rate or 1.0, duration_s, rng, args.burstiness)
    return Pattern(duration_s, times=tuple(times.tolist()))


def _traced(args: argparse.Namespace, trace: list[TracedRequest], limit_s: float) -> Pattern:
    """The part of a trace that is due within the limit. A shorter trace ends one mean gap after its last request."""
    from millrace.load.processes import Pattern

    chosen = tuple(one for one in trace if one.at_s / args.speed < limit_s)
    if len(chosen) < len(trace):
        print(
            f"The first {len(chosen)} of the trace's {len(trace)} requests are due within {limit_s:g} s; use a longer"
            " --seconds or a higher --speed to send more.",
            file=sys.stderr,
        )
        return Pattern(limit_s, trace=chosen, speed=args.speed)
    last_s = max(one.at_s for one in trace) / args.speed
    duration_s = min(limit_s, last_s * len(trace) / (len(trace) - 1)) if last_s > 0 else limit_s
    if duration_s <= args.warmup:
        raise UsageError(f"The trace takes {duration_s:.1f} s, all of it warm-up; use a shorter --warmup.")
    return Pattern(duration_s, trace=chosen, speed=args.speed)


async def _measure(
    args: argparse.Namespace, endpoint: Endpoint, workload: Workload, rate: float | None
) -> tuple[Outcome, dict[str, Any] | None]:
    from millrace.load.processes import run_load
    from millrace.load.records import Outcome
    from millrace.load.server_side import server_stats
    from millrace.observe.slo.objective import parse_objective

    objectives = tuple(parse_objective(text) for text in args.slo)
    pattern = _pattern(args, rate)
    records = await run_load(endpoint, pattern, workload, args.processes, _live_line)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    measured = [record for record in records if args.warmup <= record.intended_s < pattern.duration_s]
    seconds = pattern.duration_s - args.warmup
    server = await server_stats(endpoint, seconds)
    return Outcome(measured, seconds, objectives), server


def _live_line(progress: Progress) -> None:
    """One line on a terminal that follows the run."""
    if sys.stderr.isatty():
        running = progress.sent - progress.ended
        line = f"{progress.sent} sent, {running} running, {progress.failed} failed, {progress.events} events"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _bottleneck(outcome: Outcome, server: dict[str, Any] | None) -> str:
    from millrace.load.server_side import bottleneck

    summary = outcome.summary()
    ttft = summary["ttft_ms"]
    return bottleneck(server, summary["late_sends_ms"], ttft["p50"] if ttft else 0.0)


async def _sweep(args: argparse.Namespace, endpoint: Endpoint, workload: Workload) -> int:
    from millrace.load.sweep import Point, find_highest_rate

    async def measure(rate: float) -> Point:
        outcome, server = await _measure(args, endpoint, workload, rate)
        is_met = all(outcome.meets(objective) for objective in outcome.objectives)
        return Point(rate, outcome, is_met, _bottleneck(outcome, server))

    sweep = await find_highest_rate(measure, args.rate or 1.0, args.precision, _print_point)
    best, knee = sweep.best, sweep.knee
    if best is None:
        print("No rate met the objectives.")
    else:
        print(f"\nThe highest rate that meets the objectives is {best.rate:.2f} requests/s.")
    if knee is not None:
        print(f"The bottleneck at {knee.rate:.2f} requests/s is {knee.bottleneck}")
    shown = best or knee
    assert shown is not None
    _write(args, endpoint, shown.outcome, (knee or shown).bottleneck, None, sweep)
    return 0 if best is not None else 1


def _print_point(point: Point) -> None:
    verdict = "met   " if point.is_met else "missed"
    ttft = point.outcome.summary()["ttft_ms"]
    shown = f"TTFT p95 {ttft['p95']:.0f} ms" if ttft else "no answers"
    print(f"{point.rate:8.2f} requests/s  {verdict}  goodput {point.outcome.goodput:.2f}/s  {shown}", flush=True)


def _write(
    args: argparse.Namespace,
    endpoint: Endpoint,
    outcome: Outcome,
    cause: str,
    server: dict[str, Any] | None,
    sweep: Sweep | None,
) -> None:
    from millrace.load.report import html_report, report_of, table

    skipped = ("api_key", "json", "html", "compare", "debug")
    settings = {name: value for name, value in vars(args).items() if name not in skipped}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    plain = (str, int, float, list, type(None))
    settings = {name: value for name, value in settings.items() if isinstance(value, plain)}
    settings["model"] = endpoint.model
    report = report_of(settings, outcome, cause, server)
    if sweep is not None:
        report["sweep"] = [
            {"rate": point.rate, "met": point.is_met, "bottleneck": point.bottleneck, **point.outcome.summary()}
            for point in sweep.points
        ]
    print(table(report["summary"]))
    print(f"  bottleneck: {cause}")
    if args.json:
        args.json.write_text(json.dumps(report), encoding="utf-8")
    if args.html:
        args.html.write_text(html_report(report, outcome, sweep), encoding="utf-8")
