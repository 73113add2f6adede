"""`millrace bench policies`, `eviction`, `kv-tiers` and `fetch`: what policies and caches do to recorded traffic."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.printing import print_figures
from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import load_settings
from millrace.terminal.settings_table import toml_lines
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.figures import Figure

TRACE_REQUESTS = 3000
TIER_REQUESTS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("bench policies")
    trace.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens; gateway, eviction, kv-tiers: Mooncake",
    )
    trace.add_argument("--requests", type=int, metavar="N", help="number of requests (default: 3000; kv-tiers: 64)")
    trace.add_argument("--speed", type=float, default=4.0, metavar="X", help="speed-up of the trace (default: 4)")
    trace.add_argument("--svg", type=Path, metavar="FILE", help="write the plot to this file")


def run_policies(args: argparse.Namespace) -> int:
    from millrace.bench.micro.policies import ReplayResult, compare, plot_svg, policy_figures, read_trace

    if args.trace is None:
        raise UsageError("bench policies needs --trace FILE: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens.")
    num_requests = args.requests or TRACE_REQUESTS
    arrivals = read_trace(args.trace, num_requests, args.speed)
    results: list[ReplayResult] = []

    def figures() -> Iterable[Figure]:
        for done in compare(arrivals):
            results.append(done)
            yield from policy_figures(done).figures()

    title = f"Policies on {num_requests} requests of {args.trace.name}, {args.speed:g} times as fast"
    code = print_figures(figures(), title, "policies", as_json=args.json)
    if args.svg is not None:
        args.svg.write_text(plot_svg(results), encoding="utf-8")
    return code


def run_eviction(args: argparse.Namespace) -> int:
    from millrace.bench.micro.eviction import eviction_figures

    if args.trace is None:
        raise UsageError("bench eviction needs --trace FILE: JSON lines with hash_ids, as in the Mooncake traces.")
    title = f"Policies of eviction on {args.trace.name}: share of the prompt tokens found"
    figures = eviction_figures(args.trace)
    return print_figures(figures, title, "eviction", as_json=args.json)


def run_kv_tiers(args: argparse.Namespace) -> int:
    from millrace.bench.kv_tiers import HOST_GIB, POOL_TOKENS, KvTiersBench
    from millrace.bench.micro.tiers import tier_figures

    if args.trace is not None:
        title = f"Write policies of the disk on {args.trace.name}: share of the prompt tokens found"
        return print_figures(tier_figures(args.trace, args.svg), title, "kv-tiers", as_json=args.json)
    count = TIER_REQUESTS if args.requests is None else args.requests
    if count < 1:
        raise UsageError(f"--requests is {count}; it must be 1 or more.")
    loaded = load_settings(args)
    memory = loaded.config.memory
    if memory.kv_disk or memory.kv_gib:
        raise UsageError("bench kv-tiers has a directory of its own, and sizes by --kv-tokens and --kv-host-gib only.")
    line = StatusLine()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        file.write_text("\n".join(toml_lines(loaded)), encoding="utf-8")
        sizes = memory.kv_tokens or POOL_TOKENS, memory.kv_host_gib or HOST_GIB
        bench = KvTiersBench(("--config", str(file)), count, *sizes)
        figures = list(bench.run(line.show, args.svg))
    line.clear()
    title = f"A working set of four times the KV pool, {count} requests"
    return print_figures(figures, title, "kv-tiers", as_json=args.json)


def run_fetch(args: argparse.Namespace) -> int:
    from millrace.bench.gateway.fetch import run

    figures = run((load_settings(args).config.model.source, "--threads", "1"), args.tokens, args.rounds or 4)
    return print_figures(figures, "A prompt that another replica has", "fetch", as_json=args.json)
