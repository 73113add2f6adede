"""`millrace faults`: make things go wrong on purpose, for minutes, and see that what must hold does hold."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.faults.rest import Rests

USAGE = "millrace faults {disconnects,fuzz,kill-engine,kill-front,overload} [options]"
EXAMPLES = """\
examples:
  millrace faults disconnects --clients 2000 --seconds 300   clients that leave at random moments
  millrace faults fuzz --seconds 600                         mutated requests: no 5xx, no hang, no leak
  millrace faults kill-engine --seconds 120                  the engine is killed under load, again and again
  millrace faults kill-front --seconds 120                   a further front is
  millrace faults overload --seconds 60                      twice as much as it can do, in three classes

A server of our own is started for each. The exit code is 1 when something did not hold."""

_QUICK = ("--kv-tokens", "4096", "--max-context", "512")
"""A small KV pool: its pages become resident as they are first used, which would look like a leak."""
_OPTIONS: dict[str, tuple[str, ...]] = {
    "disconnects": (*_QUICK, "--max-running", "64"),
    "fuzz": _QUICK,
    "kill-engine": (*_QUICK, "--fronts", "2"),
    "kill-front": (*_QUICK, "--fronts", "2"),
    "overload": (
        *(*_QUICK, "--max-running", "16", "--max-waiting", "256"),
        *("--ttft-interactive-s", "2", "--ttft-standard-s", "10", "--ttft-batch-s", "10"),
    ),
}
MEMORY_SLACK_MIB = 48.0
"""What the second half may add: allocators never come back to exactly the same."""
FILES_SLACK = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help=", ".join(_OPTIONS))
    parser.add_argument("--seconds", type=float, default=60.0, metavar="X", help="how long (default: 60)")
    parser.add_argument("--clients", type=int, default=2000, metavar="N", help="clients at once (disconnects)")
    parser.add_argument(
        "--factor", type=float, default=2.0, metavar="X", help="of what it can do (overload; default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same faults")


def run(args: argparse.Namespace) -> int:
    if args.what not in _OPTIONS:
        raise UsageError(f"There is no fault '{args.what}'. There are: {', '.join(_OPTIONS)}.")
    from millrace.serve.app import allow_many_connections

    allow_many_connections()
    return asyncio.run(_with_server(args))


async def _with_server(args: argparse.Namespace) -> int:
    from millrace.bench.local_server import LocalServer

    actions: dict[str, Callable[[argparse.Namespace, str, int], Awaitable[list[str]]]] = {
        "disconnects": _disconnects,
        "fuzz": _fuzz,
        "kill-engine": _kill,
        "kill-front": _kill,
        "overload": _overload,
    }
    with LocalServer(_OPTIONS[args.what]) as server:
        await server.wait_ready()
        broken = await actions[args.what](args, server.url, server.pid)
    for line in broken:
        print(f"DID NOT HOLD: {line}")
    print("Everything held." if not broken else f"{len(broken)} things did not hold.")
    return 1 if broken else 0


async def _disconnects(args: argparse.Namespace, url: str, pid: int) -> list[str]:
    from millrace.faults.disconnects import churn

    result = await churn(url, pid, args.clients, args.seconds, args.seed)
    print(
        f"{result.left} requests were left by their clients, {result.ended} read to the end, {result.refused} refused."
    )
    return _leaks(result.rests, args.seconds)


async def _fuzz(args: argparse.Namespace, url: str, pid: int) -> list[str]:
    from millrace.faults.fuzz import fuzz

    result = await fuzz(url, pid, args.seconds, args.seed)
    counts = ", ".join(f"{count} × {status}" for status, count in sorted(result.statuses.items()))
    print(f"{result.sent} mutated requests: {counts}.")
    return [*result.faults, *_leaks(result.rests, args.seconds)]


async def _kill(args: argparse.Namespace, url: str, pid: int) -> list[str]:
    from millrace.faults.kills import kill_again_and_again

    part = "engine" if args.what == "kill-engine" else "front"
    result = await kill_again_and_again(url, pid, "engine" if part == "engine" else "front", args.seconds)
    times = sorted(result.back_s)
    print(
        f"{result.kills} kills of the {part}: {result.told} streams told, {result.cut} cut, {result.whole} whole;"
        f" ready again after {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s (worst)."
    )
    return [f"{result.cut} streams ended without an error event"] if part == "engine" and result.cut else []


async def _overload(args: argparse.Namespace, url: str, pid: int) -> list[str]:
    from millrace.faults.overload import overload

    capacity, results = await overload(url, args.seconds, args.factor, at_once=16)
    print(f"Capacity {capacity:.1f} requests/s; {args.factor:g} times that were offered for {args.seconds:g} s.")
    for one in results:
        retry = f", Retry-After {min(one.retry_after_s)} to {max(one.retry_after_s)} s" if one.retry_after_s else ""
        shed = 100 * one.shed / max(1, one.offered)
        print(
            f"  {one.name:12} offered {one.offered:5}, served {one.served:5}, shed {shed:4.0f}%{retry};"
            f" TTFT p50 {one.ttft(50):.2f} s, p99 {one.ttft(99):.2f} s; {one.failed} failed"
        )
    interactive, _, batch = results
    broken = [f"{one.failed} {one.name} requests failed" for one in results if one.failed]
    if interactive.ttft(99) > 2.0:
        broken.append(f"interactive's TTFT p99 is {interactive.ttft(99):.2f} s; its objective is 2 s")
    if batch.shed == 0 or interactive.shed / interactive.offered > batch.shed / batch.offered:
        broken.append("batch was not shed first")
    return broken


def _leaks(rests: Rests | None, seconds: float) -> list[str]:
    from millrace.faults.rest import LONG_RUN_S

    assert rests is not None
    before, half, after = rests.before, rests.half, rests.after
    print(
        f"At rest, warmed up, half way and in the end: memory {before.memory_mib:.0f}, {half.memory_mib:.0f},"
        f" {after.memory_mib:.0f} MiB; open files {before.open_files}, {half.open_files}, {after.open_files};"
        f" in the end {after.used_blocks:.0f} KV blocks in use and {after.requests:.0f} requests."
    )
    broken = []
    if after.used_blocks or after.requests:
        broken.append(f"{after.used_blocks:.0f} KV blocks and {after.requests:.0f} requests are still held")
    if after.memory_mib - half.memory_mib > MEMORY_SLACK_MIB and seconds >= LONG_RUN_S:
        broken.append(f"memory grew by {after.memory_mib - half.memory_mib:.0f} MiB in the second half")
    if after.open_files - before.open_files > FILES_SLACK:
        broken.append(f"{after.open_files - before.open_files} more files are open")
    return broken
