"""`millrace bench observe`: what metrics, traces, objectives and cost take from throughput, in alternating rounds."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.benchmarks.bench_serve import server_options
from millrace.sources.names import has_gpu
from millrace.terminal.parser import UsageError, numbers
from millrace.terminal.settings_options import load_settings
from millrace.terminal.status_line import StatusLine

if TYPE_CHECKING:
    from millrace.bench.http.observing import Ratio, Round
    from millrace.config import LoadedConfig

ROUNDS, SECONDS, STREAMS, CLIENTS, WARM_UP_S = 6, 5.0, "64", 2, 1.0
BAR = 0.02
GPU_KV_GIB = "16"
"""Of each server. By default the one that is started first would take nearly all of the GPU's memory."""
EXAMPLES = """\
bench observe:
  millrace bench observe --streams 8 --tokens 32          everything on against everything off, on this machine
  millrace bench observe --streams 512 --clients 6 --json"""


def run(args: argparse.Namespace) -> int:
    """One measurement per number of streams. Exit code 1 if a cost is surely above the bar, or a request failed."""
    rounds = ROUNDS if args.rounds is None else args.rounds
    if not 2 <= rounds <= 100:
        raise UsageError(f"--rounds is {rounds}; it must be from 2 to 100.")
    return max([_measure(args, streams, rounds) for streams in numbers("--streams", args.streams or STREAMS)])


def _measure(args: argparse.Namespace, streams: int, rounds: int) -> int:
    from millrace.bench.http.observing import ObserveBench
    from millrace.bench.http.serving import ServeBench

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = load_settings(args)
        measured = ServeBench(
            (*server_options(folder, settings), *with_equal_memory(settings)),
            (streams,),
            tokens=args.tokens,
            seconds=args.seconds or SECONDS,
            warm_up_s=WARM_UP_S,
            clients=args.clients or CLIENTS,
        )
        line, found = StatusLine(), []
        for one in ObserveBench(measured, rounds, folder).run(line.show):
            line.clear()
            found.append(one)
            off, on = one.off.output_tokens_per_s, one.on.output_tokens_per_s
            if not args.json:
                print(f"{streams} streams, round {len(found)}: {off:,.1f} tok/s off, {on:,.1f} on", flush=True)
    return _report(found, as_json=args.json)


def with_equal_memory(settings: LoadedConfig) -> tuple[str, ...]:
    """Options that give both servers the same KV memory."""
    run, memory = settings.config.run, settings.config.memory
    is_given = memory.kv_gib or memory.kv_tokens
    return () if run.device == "cpu" or is_given or not has_gpu() else ("--kv-gib", GPU_KV_GIB)


def _report(rounds: list[Round], *, as_json: bool) -> int:
    from millrace.bench.http.observing import ratio_of, server_cpu_per_token

    throughput = ratio_of(rounds, lambda figures: figures.output_tokens_per_s)
    cpu = ratio_of(rounds, server_cpu_per_token)
    errors = sum(one.off.errors + one.on.errors for one in rounds)
    is_above = 1 - throughput.high > BAR
    if as_json:
        print(json.dumps(_record(rounds, throughput, cpu, errors)))
    else:
        print(
            f"Everything on takes {1 - throughput.value:.2%} of the throughput (95% interval"
            f" {1 - throughput.high:.2%} to {1 - throughput.low:.2%}, {len(rounds)} rounds)"
            f" and {cpu.value - 1:.2%} more CPU per token ({cpu.low - 1:.2%} to {cpu.high - 1:.2%})."
        )
        if errors:
            print(f"{errors} requests failed.")
    return 1 if is_above or errors else 0


def _record(rounds: list[Round], throughput: Ratio, cpu: Ratio, errors: int) -> dict[str, object]:
    return {
        "case": "observe",
        "streams": rounds[0].off.streams,
        "rounds": len(rounds),
        "tokens_per_s_off": [round(one.off.output_tokens_per_s, 2) for one in rounds],
        "tokens_per_s_on": [round(one.on.output_tokens_per_s, 2) for one in rounds],
        "throughput_cost": round(1 - throughput.value, 5),
        "throughput_cost_interval": [round(1 - throughput.high, 5), round(1 - throughput.low, 5)],
        "cpu_per_token_ratio": round(cpu.value, 5),
        "cpu_per_token_interval": [round(cpu.low, 5), round(cpu.high, 5)],
        "errors": errors,
    }
