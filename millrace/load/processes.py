"""A run spread over several processes: request i goes to process i modulo their number."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from millrace.errors import MillraceError
from millrace.load.arrivals import ArrivalKind
from millrace.load.client import Endpoint
from millrace.load.records import Record
from millrace.load.run import Progress, Runner, watched
from millrace.load.sources import TracedRequest
from millrace.load.workload import LoadRequest, Workload

START_S = 0.2
"""Between the moment when all processes are ready and the first request."""
PROCESS_START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Pattern:
    """When requests are sent."""

    duration_s: float
    concurrency: int = 0
    """Clients of a closed loop; 0 = an open loop."""
    times: tuple[float, ...] = ()
    """Intended times of an open loop."""
    trace: tuple[TracedRequest, ...] = ()
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How to draw the times of an open loop."""

    kind: ArrivalKind = "poisson"
    burstiness: float = 1.0


def requests_of(pattern: Pattern, workload: Workload, part: int, num_parts: int) -> Iterator[LoadRequest]:
    if pattern.concurrency:
        return (workload.request(number, -1.0) for number in itertools.count(part, num_parts))
    if pattern.trace:
        mine = itertools.islice(enumerate(pattern.trace), part, None, num_parts)
        return (workload.traced(number, one, pattern.speed) for number, one in mine)
    times = itertools.islice(enumerate(pattern.times), part, None, num_parts)
    return (workload.request(number, at_s) for number, at_s in times)


async def run_part(
    endpoint: Endpoint,
    pattern: Pattern,
    workload: Workload,
    part: int,
    num_parts: int,
    start: float,
    tick: Callable[[Progress], None],
) -> list[Record]:
    runner = Runner(endpoint)
    requests = requests_of(pattern, workload, part, num_parts)
    if pattern.concurrency:
        mine = pattern.concurrency // num_parts + (part < pattern.concurrency % num_parts)
        run = runner.closed_loop(requests, mine, start, start + pattern.duration_s)
    else:
        run = runner.open_loop(requests, start)
    await watched(asyncio.create_task(run), lambda: tick(runner.progress))
    return runner.records


async def run_load(
    endpoint: Endpoint,
    pattern: Pattern,
    workload: Workload,
    num_processes: int = 1,
    tick: Callable[[Progress], None] = lambda progress: None,
) -> list[Record]:
    """All records of a run, by time."""
    if num_processes <= 1:
        start = time.monotonic() + START_S
        records = await run_part(endpoint, pattern, workload, 0, 1, start, tick)
    else:
        records = await _run_processes(endpoint, pattern, workload, num_processes, tick)
    return sorted(records, key=lambda record: record.intended_s)


async def _run_processes(
    endpoint: Endpoint, pattern: Pattern, workload: Workload, num_processes: int, tick: Callable[[Progress], None]
) -> list[Record]:
    """Processes say when they are ready and are then told a common start."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    children = []
    for part in range(num_processes):
        ours, theirs = context.Pipe()
        arguments = (theirs, endpoint, pattern, workload, part, num_processes)
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        await asyncio.gather(*(asyncio.to_thread(_await_ready, pipe) for pipe in pipes))
        start = time.monotonic() + START_S
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(start))
        parts = await asyncio.gather(*(asyncio.to_thread(_receive, pipe) for pipe in pipes))
    finally:
        for child in children:
            child.join(timeout=5)
            if child.is_alive():
                child.kill()
    records = [record for part in parts for record in part]
    tick(Progress(len(records), len(records), sum(bool(record.error) for record in records)))
    return records


def _await_ready(pipe: Connection) -> None:
    try:
        if pipe.poll(PROCESS_START_LIMIT_S):
            pipe.recv_bytes()
            return
    except EOFError:
        pass
    raise MillraceError(f"A load process did not start within {PROCESS_START_LIMIT_S:g} s; see its error above.")


def _receive(pipe: Connection) -> list[Record]:
    try:
        return msgspec.msgpack.decode(pipe.recv_bytes(), type=list[Record])
    except EOFError:
        raise MillraceError("A load process ended without its results; see its error above.") from None


def _child(
    pipe: Connection, endpoint: Endpoint, pattern: Pattern, workload: Workload, part: int, num_parts: int
) -> None:
    pipe.send_bytes(b"ready")
    start = msgspec.msgpack.decode(pipe.recv_bytes(), type=float)
    records = asyncio.run(run_part(endpoint, pattern, workload, part, num_parts, start, lambda progress: None))
    pipe.send_bytes(msgspec.msgpack.encode(records))
    pipe.close()
