"""`millrace faults`: injects faults into a server for a while and checks that it behaves as promised."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.faults.gateway_drill import DrillResult
    from millrace.faults.kills import KillResult
    from millrace.faults.leak_check import IdleReadings

USAGE = "millrace faults {disconnects,fuzz,gateway,kill-engine,kill-front,overload} [options]"
EXAMPLES = """\
examples:
  millrace faults disconnects --clients 2000 --seconds 300   clients disconnect at random moments
  millrace faults fuzz --seconds 600                         mutated requests: no 5xx, no hang, no leak
  millrace faults gateway --seconds 600                      kill, stop and corrupt replicas under two gateways
  millrace faults gateway --kills 200                        a soak: kill a replica 200 times, and nothing else
  millrace faults kill-engine --seconds 120                  kill the engine under load, repeatedly
  millrace faults kill-front --seconds 120                   kill the second front under load, repeatedly
  millrace faults kill-rank --seconds 120                    kill a rank of a split model under load, repeatedly
  millrace faults kill-rank --kills 200 --clients 4          a soak: 200 times, under 4 streams each, in bursts of 5
  millrace faults overload --seconds 60                      twice the capacity, in three priority classes

Each run starts its own server; gateway starts a gateway and null replicas. SIGTERM and Ctrl-C end them, too.
Soaks say how long they still take, and end with a table of what was seen and its bars. The exit code is 1 if a check
failed."""

Say = Callable[[str], None]
"""Reports what a run found."""
DEFAULT_S = 60.0
EXIT_TERMINATED = 143
_SMALL_POOL = ("--kv-tokens", "4096", "--max-context", "512")
"""KV pages become resident when first used; a large pool would look like a leak."""
_SERVER_OPTIONS: dict[str, tuple[str, ...]] = {
    "disconnects": (*_SMALL_POOL, "--max-running", "64"),
    "fuzz": _SMALL_POOL,
    "kill-engine": (*_SMALL_POOL, "--deterministic", "--fronts", "2"),
    "kill-front": (*_SMALL_POOL, "--deterministic", "--fronts", "2"),
    "kill-rank": (*_SMALL_POOL, "--deterministic", "--device", "cpu", "--tensor-parallel", "2"),
    "overload": (
        *(*_SMALL_POOL, "--max-running", "16", "--max-waiting", "256"),
        *("--ttft-interactive-s", "2", "--ttft-standard-s", "10", "--ttft-batch-s", "10"),
    ),
}
MEMORY_SLACK_MIB = 48.0
"""Growth allowed in the second half: allocators never return to exactly the same size."""
FILES_SLACK = 12
"""Growth allowed in the number of open files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help=", ".join(sorted((*_SERVER_OPTIONS, "gateway"))))
    parser.add_argument(
        "--seconds", type=float, metavar="X", help="duration (default: 60; with --kills: until they are done)"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=0,
        metavar="N",
        help="kill this many times; of gateway: only replicas, and nothing else",
    )
    parser.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="concurrent clients of disconnects (default: 2000), gateway and kills (32)",
    )
    parser.add_argument(
        "--factor", type=float, default=2.0, metavar="X", help="load of overload, times the capacity (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the faults (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.what not in (*_SERVER_OPTIONS, "gateway"):
        raise UsageError(f"Unknown fault '{args.what}'. Faults: {', '.join((*_SERVER_OPTIONS, 'gateway'))}.")
    from millrace.serve.app import allow_many_connections

    allow_many_connections()
    can_kill = [name for name, action in _ACTIONS.items() if action is _kill]
    if args.kills and args.what not in ("gateway", *can_kill):
        raise UsageError(f"--kills is for gateway, {', '.join(can_kill)}.")
    if args.what != "gateway" and args.seconds is None:
        args.seconds = DEFAULT_S
    try:
        return asyncio.run(_gateway(args) if args.what == "gateway" else _with_server(args))
    except asyncio.CancelledError:
        return EXIT_TERMINATED


async def _with_server(args: argparse.Namespace) -> int:
    from millrace.bench.local_server import LocalServer, cancel_on_sigterm

    cancel_on_sigterm()
    with LocalServer(_SERVER_OPTIONS[args.what]) as server:
        await server.wait_ready()
        said: list[str] = []
        failures = await _ACTIONS[args.what](args, server.url, server.pid, said.append if args.json else print)
    return _report(args, said, failures)


async def _gateway(args: argparse.Namespace) -> int:
    from millrace.bench.local_server import cancel_on_sigterm
    from millrace.faults.gateway_drill import KINDS, DrillResult, drill

    cancel_on_sigterm()
    kinds = ("kill",) if args.kills else KINDS
    seconds = args.seconds if args.seconds is not None else 0.0 if args.kills else DEFAULT_S
    result = DrillResult()
    try:
        await drill(seconds, args.clients or 32, args.seed, kinds, args.kills, _say_progress, result)
    except asyncio.CancelledError:
        _print_drill(result, "Ended early. ")
        raise
    return _report(args, [_print_drill(result, "") if not args.json else _drilled(result)], result.failures())


def _print_drill(result: DrillResult, before: str) -> str:
    from millrace.terminal.table import print_table

    text = before + _drilled(result)
    print(text)
    print_table(result.table(), right=(1, 2, 3))
    print_table(result.bars(), right=(1, 2))
    return text


def _drilled(result: DrillResult) -> str:
    faults = ", ".join(f"{count} × {kind}" for kind, count in result.num_faults.items() if count)
    return (
        f"{sum(result.num_faults.values())} faults ({faults}). Streams: {result.num_right} right,"
        f" {len(result.wrong)} lost or wrong, {result.num_refused} refused, {result.num_cut} sent again because their"
        f" gateway was killed. Longest gap {result.longest_gap_s:.1f} s."
    )


def _say_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(args: argparse.Namespace, said: list[str], failures: list[str]) -> int:
    if args.json:
        print(json.dumps({"fault": args.what, "seconds": args.seconds, "report": said, "failures": failures}))
        return 1 if failures else 0
    for line in failures:
        print(f"FAILED: {line}")
    print(f"{len(failures)} checks failed." if failures else "All checks passed.")
    return 1 if failures else 0


async def _disconnects(args: argparse.Namespace, url: str, pid: int, say: Say) -> list[str]:
    from millrace.faults.disconnects import churn

    result = await churn(url, pid, args.clients or 2000, args.seconds, args.seed)
    say(
        f"Requests: {result.abandoned} abandoned by their client, {result.completed} read to the end,"
        f" {result.refused} refused."
    )
    return _leaks(result.readings, args.seconds, say)


async def _fuzz(args: argparse.Namespace, url: str, pid: int, say: Say) -> list[str]:
    from millrace.faults.fuzz import fuzz

    result = await fuzz(url, pid, args.seconds, args.seed)
    counts = ", ".join(f"{count} × {status}" for status, count in sorted(result.statuses.items()))
    say(f"{result.sent} mutated requests: {counts}.")
    return [*result.faults, *_leaks(result.readings, args.seconds, say)]


async def _kill(args: argparse.Namespace, url: str, pid: int, say: Say) -> list[str]:
    from millrace.faults.kills import BURST, PARTS, REST_S, KillResult, kill_repeatedly, shortest_s

    part = PARTS[args.what]
    if args.kills > BURST and part != "front":
        at_least = shortest_s(part, args.kills) / 60
        _say_progress(
            f"{args.kills} kills in bursts of {BURST}, with {REST_S:g} s of serving between them: {at_least:.0f} min,"
            " and the starts of the engines."
        )
    result = KillResult(part)
    try:
        await kill_repeatedly(url, pid, part, args.seconds, args.kills, args.clients or 32, _say_progress, result)
    except asyncio.CancelledError:
        if result.recovery_s:
            print(f"Ended early. {_killed(result)}")
        raise
    say(_killed(result))
    lost = result.cut + result.failed + result.refused
    if not args.json:
        _print_kills(result, lost)
    failures = [f"{lost} streams did not go on with the next engine"] if part != "front" and lost else []
    return failures + ([f"{result.wrong} streams had other tokens than without kills"] if result.wrong else [])


def _killed(result: KillResult) -> str:
    times = sorted(result.recovery_s)
    return (
        f"{result.kills} kills of the {result.part}. Streams: {result.failed} ended with an error event,"
        f" {result.refused} got an error status, {result.cut} cut off, {result.wrong} wrong, {result.completed}"
        f" completed and right. Recovery: {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s (worst)."
    )


def _print_kills(result: KillResult, lost: int) -> None:
    from millrace.faults.kills import RECOVERY_LIMIT_S
    from millrace.terminal.table import print_table

    held, worst = "" if result.part == "front" else "MISSED" if lost else "held", max(result.recovery_s)
    print_table(
        [
            (f"{result.kills} kills of the {result.part}", "seen", "bar", ""),
            ("streams completed and right", str(result.completed), "", ""),
            ("streams with wrong tokens", str(result.wrong), "0", "MISSED" if result.wrong else "held"),
            ("streams lost", str(lost), "" if result.part == "front" else "0", held),
            ("longest until it is ready again", f"{worst:.1f} s", f"{RECOVERY_LIMIT_S:g} s", "held"),
        ],
        right=(1, 2),
    )


async def _overload(args: argparse.Namespace, url: str, pid: int, say: Say) -> list[str]:
    from millrace.faults.overload import overload

    capacity, results = await overload(url, args.seconds, args.factor, concurrency=16)
    say(f"Capacity {capacity:.1f} requests/s; offered {args.factor:g} times that for {args.seconds:g} s.")
    for one in results:
        retry = f", Retry-After {min(one.retry_after_s)} to {max(one.retry_after_s)} s" if one.retry_after_s else ""
        shed = 100 * one.shed / max(1, one.offered)
        say(
            f"  {one.name:12} offered {one.offered:5}, served {one.served:5}, rejected {shed:4.0f}%{retry};"
            f" TTFT p50 {one.ttft(50):.2f} s, p99 {one.ttft(99):.2f} s; {one.failed} failed"
        )
    interactive, _, batch = results
    failures = [f"{one.failed} {one.name} requests failed" for one in results if one.failed]
    if interactive.ttft(99) > 2.0:
        failures.append(f"TTFT p99 of interactive is {interactive.ttft(99):.2f} s; its objective is 2 s")
    if batch.shed == 0 or interactive.shed / interactive.offered > batch.shed / batch.offered:
        failures.append("batch requests were not rejected first")
    return failures


def _leaks(readings: IdleReadings | None, seconds: float, say: Say) -> list[str]:
    from millrace.faults.leak_check import LONG_RUN_S

    assert readings is not None
    before, half, after = readings.before, readings.half, readings.after
    say(
        f"Idle after warm-up, half and all of the run: memory {before.memory_mib:.0f}, {half.memory_mib:.0f},"
        f" {after.memory_mib:.0f} MiB; open files {before.open_files}, {half.open_files}, {after.open_files}."
        f" At the end: {after.used_blocks:.0f} KV blocks in use, {after.requests:.0f} requests."
    )
    failures = []
    if after.used_blocks or after.requests:
        failures.append(f"{after.used_blocks:.0f} KV blocks and {after.requests:.0f} requests are still held")
    if after.memory_mib - half.memory_mib > MEMORY_SLACK_MIB and seconds >= LONG_RUN_S:
        failures.append(f"memory grew by {after.memory_mib - half.memory_mib:.0f} MiB in the second half")
    if after.open_files - before.open_files > FILES_SLACK:
        failures.append(f"{after.open_files - before.open_files} more files are open")
    return failures


_ACTIONS: dict[str, Callable[[argparse.Namespace, str, int, Say], Awaitable[list[str]]]] = {
    "disconnects": _disconnects,
    "fuzz": _fuzz,
    "kill-engine": _kill,
    "kill-front": _kill,
    "kill-rank": _kill,
    "overload": _overload,
}
