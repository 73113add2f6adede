"""`millrace bench`: this machine, any OpenAI-compatible server, its peers, the scheduler alone, or a GPU."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands import bench_gpu, bench_peers, bench_serve
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import add_settings, load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.figures import Figure
    from millrace.bench.http.suite import SuiteOptions
    from millrace.bench.http.workloads import Workload

USAGE = "millrace bench [local | peers | plan | step | front | serve | policies | gpu] [options]"
EXIT_ENDED = 143
"""As a shell reports a command that was asked to end by SIGTERM."""
_PERPLEXITY = "perplexity"
_EXAMPLES = """\
workloads:
  single         512 in / 128 out, one at a time
  batch-1/4/16   256 in / 64 out, all at once
  mixed          64 requests, 64–512 in / 64–256 out, 16 at once
  shared-prefix  64 requests, 1,024 shared + 32 own in / 32 out, 8 at once
  prefix-cold    1,056 in, never seen before, one at a time
  prefix-warm    the same beginnings again, one at a time
  perplexity     of a fixed text, through the API: what the settings cost in quality

examples:
  millrace bench                                         start the default model here and measure everything
  millrace bench --model ./my-model --dtype bfloat16     another model, with settings as for serve
  millrace bench --url http://127.0.0.1:8080             any OpenAI-compatible server, the same work
  millrace bench --url … --workloads single,mixed --json one JSON line per figure
  millrace bench plan                                    host time of planning: decode steps, first tokens
  millrace bench step                                    what a step on the CPU spends its time on
  millrace bench front --streams 64,512,2048             fronts over a null engine: tokens/s, µs of CPU per token
  millrace bench front --fronts 1,2 --streams 512        the same with one front and with two
  millrace bench policies --trace trace.csv --svg p.svg  scheduling policies on a recorded trace, device simulated"""
EXAMPLES = f"{_EXAMPLES}\n\n{bench_peers.EXAMPLES}\n\n{bench_serve.EXAMPLES}\n\n{bench_gpu.EXAMPLES}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="local",
        metavar="WHAT",
        help="local (default), peers, plan, step, front, serve, policies, gpu",
    )
    parser.add_argument("--url", default="", help="measure this server; without it one is started here")
    parser.add_argument("--api-key", default="", help="the key that the server wants")
    parser.add_argument("--pid", type=int, default=0, help="the server's process, to report its memory (with --url)")
    parser.add_argument("--workloads", default="", metavar="NAMES", help="only these, separated by commas")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="X", help="seconds per workload (default: 300)"
    )
    parser.add_argument(
        "--content-seed", type=int, metavar="N", help="same seed, same prompts; fresh ones each run without it"
    )
    front = parser.add_argument_group("front")
    front.add_argument("--streams", default="", metavar="N,…", help="streams held open (default: 64,512)")
    front.add_argument("--fronts", default="", metavar="N,…", help="front processes (default: 1)")
    front.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens per request (default: 128)")
    front.add_argument("--seconds", type=float, default=0.0, metavar="X", help="of each measurement (default: 5)")
    front.add_argument("--step-ms", type=float, default=2.0, metavar="X", help="least time of a step (default: 2)")
    front.add_argument("--clients", type=int, default=0, metavar="N", help="processes of clients (default: 1)")
    trace = parser.add_argument_group("policies")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    trace.add_argument("--requests", type=int, default=3000, metavar="N", help="from its beginning (default: 3000)")
    trace.add_argument("--speed", type=float, default=4.0, metavar="X", help="times as fast as it was (default: 4)")
    trace.add_argument("--svg", type=Path, metavar="FILE", help="write the plot there")
    parser.add_argument("--json", action="store_true", help="one JSON line per figure instead of a table")
    bench_peers.add_arguments(parser)
    bench_serve.add_arguments(parser)
    bench_gpu.add_arguments(parser)
    add_settings(parser, taken=("fronts",))


def run(args: argparse.Namespace) -> int:
    if args.what != "peers":
        bench_peers.refuse_elsewhere(args)
    if args.what == "gpu":
        return bench_gpu.run(args)
    if args.what == "serve":
        return bench_serve.run(args)
    bench_gpu.refuse_elsewhere(args, allowed=("quick",) if args.what == "peers" else ())
    bench_serve.refuse_elsewhere(args)
    if args.what == "peers":
        return _until_ended(lambda: bench_peers.run(args))
    if args.what == "plan":
        return _bench_plan(as_json=args.json)
    if args.what == "step":
        return _bench_step(args)
    if args.what == "front":
        return _bench_front(args)
    if args.what == "policies":
        return _bench_policies(args)
    if args.what != "local":
        raise UsageError(
            f"There is no benchmark '{args.what}'. There are: local, peers, plan, step, front, serve, policies, gpu;"
            " and --url for a running server."
        )
    import uvloop

    loaded = load_settings(args)
    if not args.time_limit > 0:
        raise UsageError(f"--time-limit is {args.time_limit:g}; it must be more than 0 seconds.")
    settings = "\n".join(toml_lines(loaded))
    source = loaded.config.model.source if loaded.sources["model.source"] != "default" else ""
    # The clients share the cores with what they measure, and cost it half as much on this loop.
    return _until_ended(lambda: uvloop.run(_measure(args, settings, source)))


def _until_ended(measure: Callable[[], int]) -> int:
    try:
        return measure()
    except asyncio.CancelledError:
        return EXIT_ENDED


def _bench_plan(*, as_json: bool) -> int:
    from millrace.bench.figures import Figure, print_table
    from millrace.bench.micro.plan import BARS_MS, PROMPTS, SIZES, measure_first_cost, measure_plan_cost

    figures = []

    def add(workload: str, what: str, total_ms: float, note: str) -> None:
        figures.append(Figure(workload, what, total_ms, "ms", note=note))
        if as_json:
            print(figures[-1].as_json(target="local"), flush=True)

    for num_rows in SIZES:
        cost = measure_plan_cost(num_rows)
        bar = f", bar {BARS_MS[num_rows]} ms" if num_rows in BARS_MS else ""
        add("plan", f"{num_rows:,} rows", cost.total_ms, f"plan {cost.plan_ms:.3f} + apply {cost.apply_ms:.3f}{bar}")
    for num_tokens in PROMPTS:
        first = measure_first_cost(num_tokens)
        note = f"plan {first.plan_ms:.3f} + confirm {first.confirm_ms:.3f}, caches cold"
        add("first token", f"prompt of {num_tokens:,}", first.total_ms, note)
    if not as_json:
        print_table(figures, "Host time: one steady decode step, planned and applied; a lone request's first token")
    return 0


def _bench_step(args: argparse.Namespace) -> int:
    from millrace.bench.figures import Figure, print_table
    from millrace.bench.micro.step import StepCost, measure_steps

    figures = []

    def add(cost: StepCost) -> None:
        name, share = cost.case.name, f"products and attention {100 * cost.products_share:.0f}%"
        parts = {**cost.kinds_ms, "python and hand-over": cost.python_ms}
        rows = [Figure(name, "step", cost.wall_ms, "ms", note=share)]
        rows += [Figure(name, kind, ms, "ms", note=f"{100 * ms / cost.wall_ms:.1f}%") for kind, ms in parts.items()]
        figures.extend(rows)
        if args.json:
            for figure in rows:
                print(figure.as_json(target="step"), flush=True)

    measure_steps(load_settings(args).config, add)
    if not args.json:
        print_table(figures, "One step on the CPU by kind of work, the fastest of many")
    return 0


def _bench_front(args: argparse.Namespace) -> int:
    from millrace.bench.figures import Figure, print_table
    from millrace.bench.micro.front import FrontBench

    source = load_settings(args).config.model.source
    figures = []
    for fronts in numbers("--fronts", args.fronts or "1"):
        for streams in numbers("--streams", args.streams or "64,512"):
            bench = FrontBench(
                source, fronts, streams, args.tokens, args.seconds or 5.0, args.step_ms, args.clients or 1
            )
            cost = bench.run()
            name = f"{fronts} front{'s' if fronts > 1 else ''}, {streams:,} streams"
            note = (
                f"{cost.requests_per_s:.0f} requests/s, {cost.frames_per_token:.2f} frames/token,"
                f" TTFT p50 {cost.ttft_p50_ms:.0f} p99 {cost.ttft_p99_ms:.0f} ms, {cost.errors} errors"
            )
            rows = [
                Figure(name, "output", cost.tokens_per_s, "tok/s", note=note),
                Figure(name, "per front", cost.tokens_per_s / fronts, "tok/s"),
                Figure(name, "front CPU", cost.us_per_token, "µs/token"),
            ]
            figures += rows
            if args.json:
                for figure in rows:
                    print(figure.as_json(target="front"), flush=True)
    if not args.json:
        print_table(figures, f"Fronts over a null engine, {args.tokens} tokens per request")
    return 0


def _bench_policies(args: argparse.Namespace) -> int:
    from millrace.bench.figures import Figure, print_table
    from millrace.bench.micro.policies import Verdict, compare, plot_svg, read_trace

    if args.trace is None:
        raise UsageError("Say which trace: --trace FILE, a CSV with TIMESTAMP, ContextTokens and GeneratedTokens.")
    figures = []

    def add(verdict: Verdict) -> None:
        rows = [
            Figure(verdict.policy, "TTFT mean", verdict.ttft_mean_s, "s", note=f"{verdict.preemptions} preemptions"),
            Figure(verdict.policy, "TTFT p50", verdict.ttft_p50_s, "s"),
            Figure(verdict.policy, "TTFT p99", verdict.ttft_p99_s, "s"),
            Figure(verdict.policy, "goodput", verdict.goodput, "requests/s", note="ended before their deadline"),
            Figure(verdict.policy, "first token within 5 s", 100 * verdict.in_goal, "%"),
            Figure(verdict.policy, "fairness", verdict.fairness, "", note="Jain's index over slowdowns"),
            Figure(verdict.policy, "light tenants' p99", verdict.light_p99_s, "s", note="TTFT beside a heavy one"),
        ]
        figures.extend(rows)
        if args.json:
            for figure in rows:
                print(figure.as_json(target="policies"), flush=True)

    results = compare(read_trace(args.trace, args.requests, args.speed), add)
    if args.svg is not None:
        args.svg.write_text(plot_svg(results), encoding="utf-8")
    if not args.json:
        print_table(figures, f"Policies on {args.requests} requests of {args.trace.name}, {args.speed:g} times as fast")
    return 0


async def _measure(args: argparse.Namespace, settings: str, source: str) -> int:
    from millrace.bench.http.suite import SuiteOptions, run_local, run_remote
    from millrace.bench.http.target import Target
    from millrace.bench.local_server import end_on_sigterm

    end_on_sigterm()
    seed = int(time.time()) if args.content_seed is None else args.content_seed
    workloads, perplexity = _chosen(args.workloads)
    options = SuiteOptions(workloads, seed, args.time_limit, args.pid, perplexity)
    reporter = Reporter(args.url or "local", options, as_json=args.json)
    if args.url:
        await run_remote(Target(args.url, source, args.api_key), options, reporter.add, reporter.progress)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "settings.toml"
            file.write_text(settings, encoding="utf-8")
            await run_local(["--config", str(file)], options, reporter.add, reporter.progress)
    reporter.finish()
    return 0


def _chosen(names: str) -> tuple[tuple[Workload, ...], bool]:
    """The workloads, and whether perplexity is measured after them."""
    from millrace.bench.http.workloads import suite

    everything = {workload.name: workload for workload in suite()}
    if not names:
        return tuple(everything.values()), True
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in (*everything, _PERPLEXITY):
            raise UsageError(f"There is no workload '{name}'. There are: {', '.join((*everything, _PERPLEXITY))}.")
    return tuple(workload for name, workload in everything.items() if name in wanted), _PERPLEXITY in wanted


class Reporter:
    """Figures as they come: JSON lines at once, or one table at the end with a status line until then."""

    def __init__(self, target: str, options: SuiteOptions, *, as_json: bool) -> None:
        self._target = target
        self._seed = options.seed
        self._as_json = as_json
        self._figures: list[Figure] = []
        self._line = StatusLine()

    def add(self, figure: Figure) -> None:
        self._figures.append(figure)
        if self._as_json:
            print(figure.as_json(target=self._target), flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._line.show(what, done, total)

    def finish(self) -> None:
        from millrace.bench.figures import print_table

        self._line.clear()
        if not self._as_json:
            figures = sorted(self._figures, key=lambda figure: figure.workload != "server")
            print_table(figures, f"millrace bench of {self._target}, prompts from seed {self._seed}")
