"""What `millrace bench gpu` measures: decoding, first tokens, a mixed load, a shared prefix, the host's own time.

The workloads are those of the recorded peer figures. Each `Unit` is one figure: it can fail alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from millrace.bench.errors import BenchError
from millrace.bench.gpu.client import EngineSession, Prompts, TimedRow, decode_pace
from millrace.link.messages import EngineStats

Measured = dict[str, object]
BATCHES = (1, 8, 32, 128, 256)
CASES = ("startup", "decode", "ttft", "mixed", "prefix", "host")

_WARM_UP_FULL_ROWS = 32
_WARM_UP_SHORT = 16
_WARM_UP_OUTPUT = 8
_REPEATS, _REPEATED_BATCH = 3, 32
"""Runs of a decode figure, up to so many rows: a difference of short runs is at the mercy of each one's prompts."""
_STATS_POLL_S = 0.01
_IDLE_POLLS = 500


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and requests of every workload."""

    batches: tuple[int, ...] = BATCHES
    decode_prompt: int = 512
    decode_output: int = 128
    ttft_prompts: tuple[int, ...] = (128, 1024, 2048, 8192, 32768)
    mixed_requests: tuple[int, ...] = (256, 1024)
    mixed_low: int = 100
    mixed_high: int = 1024
    prefix_requests: int = 512
    prefix_shared: int = 2048
    prefix_own: int = 64
    prefix_output: int = 64
    host_batch: int = 256
    host_prompt: int = 32
    host_output: int = 448

    def scaled(self, factor: float) -> Sizes:
        """Every size but the batches times `factor`, and at least 4."""

        def less(value: int) -> int:
            return max(4, round(value * factor))

        changes: dict[str, Any] = {
            field.name: tuple(dict.fromkeys(map(less, value))) if isinstance(value, tuple) else less(value)
            for field in dataclasses.fields(self)
            if field.name != "batches"
            for value in (getattr(self, field.name),)
        }
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a unit needs: an engine, fresh prompts, and how thorough to be."""

    session: EngineSession
    prompts: Prompts
    sizes: Sizes
    quick: bool


@dataclass(frozen=True, slots=True)
class Unit:
    case: str
    about: dict[str, int]
    """What distinguishes it within its case, in the keys of the JSON line."""
    context: int
    """Tokens that its longest request needs."""
    run: Callable[[Bench], Awaitable[Measured]]


def units(cases: Iterable[str], sizes: Sizes, *, quick: bool) -> list[Unit]:
    """Everything to measure on one running engine, in order; the start of the engine is not among it."""
    makers = {"decode": _decode_units, "ttft": _ttft_units, "mixed": _mixed_units, "prefix": _prefix_units,
              "host": _host_units}  # fmt: skip
    wanted = set(cases)
    found = [unit for case, make in makers.items() if case in wanted for unit in make(sizes)]
    if quick and len(sizes.mixed_requests) > 1:
        most = max(sizes.mixed_requests)
        found = [unit for unit in found if not (unit.case == "mixed" and unit.about["requests"] == most)]
    return found


# -- decode ------------------------------------------------------------------------------------------------------------


def _decode_units(sizes: Sizes) -> list[Unit]:
    def unit(batch: int) -> Unit:
        about = {"batch": batch, "prompt": sizes.decode_prompt}
        return Unit("decode", about, sizes.decode_prompt + sizes.decode_output, lambda b: _decode(b, batch))

    return [unit(batch) for batch in sizes.batches]


async def _decode(bench: Bench, batch: int) -> Measured:
    """Of a few runs the one in the middle; of one run where many rows make it long and steady."""
    await _warm_up(bench, batch)
    repeats = 1 if bench.quick or batch > _REPEATED_BATCH else _REPEATS
    runs = sorted([await _decode_once(bench, batch) for _ in range(repeats)], key=lambda run: run["tpot_ms"])
    return {**runs[repeats // 2], "repeats": repeats}


async def _decode_once(bench: Bench, batch: int) -> dict[str, Any]:
    """Two views of the same pace, and as `tpot_ms` the slower of them.

    `tpot_diff_ms` is the peer's arithmetic, (T(n) - T(1)) / (n - 1) over two whole runs: blind to when tokens are
    delivered, but at large batches it counts steps in which rows have already ended. `step_ms` is wall time per step
    while all rows run, from the arrival of tokens: exact at large batches, but a token may wait for its delivery.
    """
    sizes, session, prompts = bench.sizes, bench.session, bench.prompts
    prefill = await session.generate(prompts.batch(batch, sizes.decode_prompt), 1)
    whole = await session.generate(prompts.batch(batch, sizes.decode_prompt), sizes.decode_output, row_type=TimedRow)
    _no_hits(whole.cached_tokens)
    pace = decode_pace([row for row in whole.rows if isinstance(row, TimedRow)])
    by_difference_s = (whole.seconds - prefill.seconds) / (sizes.decode_output - 1)
    slower_s = max(pace.seconds_per_step, by_difference_s)
    measured: dict[str, Any] = {
        "tpot_ms": round(1000 * slower_s, 3),
        "prefill_s": round(prefill.seconds, 4),
        "all_begun_s": round(whole.first_token_s, 4),
        "tok_s": round(batch / slower_s, 1),
        "step_ms": round(1000 * pace.seconds_per_step, 3),
        "tpot_diff_ms": round(1000 * by_difference_s, 3),
        "steps": pace.steps,
    }
    if not pace.all_rows:
        measured["note"] = "some rows ended before the last one began: fewer than all were running"
    return measured


async def _warm_up(bench: Bench, batch: int) -> None:
    """As decode, with few outputs; beyond some rows short prompts do, since a full step is full anyway."""
    sizes, ready = bench.sizes, bench.session.ready
    outputs = min(_WARM_UP_OUTPUT, sizes.decode_output)
    length = max(1, min(sizes.decode_prompt, ready.max_context - outputs, ready.kv_tokens - outputs))
    full = min(batch, _WARM_UP_FULL_ROWS)
    prompts = bench.prompts.batch(full, length) + bench.prompts.batch(batch - full, min(_WARM_UP_SHORT, length))
    await bench.session.generate(prompts, outputs)


def _no_hits(cached_tokens: int) -> None:
    if cached_tokens:
        raise BenchError(f"{cached_tokens} prompt tokens came from the prefix cache, but every prompt was new.")


# -- first tokens ------------------------------------------------------------------------------------------------------


def _ttft_units(sizes: Sizes) -> list[Unit]:
    def unit(num_tokens: int) -> Unit:
        return Unit("ttft", {"prompt": num_tokens}, num_tokens + 1, lambda b: _ttft(b, num_tokens))

    return [unit(num_tokens) for num_tokens in sizes.ttft_prompts]


async def _ttft(bench: Bench, num_tokens: int) -> Measured:
    """The median over fresh prompts, after one to warm up; seen by the client."""
    repeats = 2 if bench.quick else 7 if num_tokens <= 2048 else 5 if num_tokens <= 8192 else 3
    times = [await _first_token_ms(bench, bench.prompts.make(num_tokens)) for _ in range(repeats + 1)][1:]
    every = [round(time, 2) for time in times]
    return {"ms": round(statistics.median(times), 2), "best_ms": min(every), "repeats": repeats, "every_ms": every}


async def _first_token_ms(bench: Bench, prompt: list[int], *, fresh: bool = True) -> float:
    batch = await bench.session.generate([prompt], 1)
    if fresh:
        _no_hits(batch.cached_tokens)
    elif not batch.cached_tokens:
        raise BenchError("No prompt token came from the prefix cache, though the prefix was known.")
    return 1000 * batch.first_token_s


# -- a mixed load ------------------------------------------------------------------------------------------------------


def _mixed_units(sizes: Sizes) -> list[Unit]:
    def unit(requests: int) -> Unit:
        return Unit("mixed", {"requests": requests}, 2 * sizes.mixed_high, lambda b: _mixed(b, requests))

    return [unit(requests) for requests in sizes.mixed_requests]


async def _mixed(bench: Bench, requests: int) -> Measured:
    sizes, prompts = bench.sizes, bench.prompts
    await _warm_up(bench, min(requests, _WARM_UP_FULL_ROWS))
    lengths, outputs = prompts.lengths(requests, sizes.mixed_low, sizes.mixed_high)
    batch = await bench.session.generate([prompts.make(length) for length in lengths], outputs)
    return {
        "in_tok": sum(lengths),
        "out_tok": batch.output_tokens,
        "seconds": round(batch.seconds, 2),
        "out_tok_s": round(batch.output_tokens / batch.seconds, 1),
        "preemptions": sum(row.finish.preemptions for row in batch.rows if row.finish is not None),
        "kv_tokens": bench.session.ready.kv_tokens,
    }


# -- a shared prefix ---------------------------------------------------------------------------------------------------


def _prefix_units(sizes: Sizes) -> list[Unit]:
    about = {"requests": sizes.prefix_requests, "shared": sizes.prefix_shared, "unique": sizes.prefix_own}
    prompt = sizes.prefix_shared + sizes.prefix_own
    return [
        Unit("prefix_ttft", {}, prompt + 1, _prefix_ttft),
        Unit("prefix", {**about, "out": sizes.prefix_output}, prompt + sizes.prefix_output, _prefix),
    ]


async def _prefix_ttft(bench: Bench) -> Measured:
    """The first token of a prompt whose beginning is known, and of one that is all new."""
    sizes, prompts = bench.sizes, bench.prompts
    repeats = 2 if bench.quick else 5
    cold, warm = [], []
    for index in range(repeats + 1):
        shared = prompts.make(sizes.prefix_shared)
        first = await _first_token_ms(bench, shared + prompts.make(sizes.prefix_own))
        again = await _first_token_ms(bench, shared + prompts.make(sizes.prefix_own), fresh=False)
        if index:  # The first round warms up.
            cold.append(first)
            warm.append(again)
    return {"warm_ms": round(statistics.median(warm), 2), "cold_ms": round(statistics.median(cold), 2)}


async def _prefix(bench: Bench) -> Measured:
    sizes, prompts = bench.sizes, bench.prompts
    await _warm_up(bench, min(sizes.prefix_requests, _WARM_UP_FULL_ROWS))
    shared = prompts.make(sizes.prefix_shared)
    batch = await bench.session.generate(
        [shared + prompts.make(sizes.prefix_own) for _ in range(sizes.prefix_requests)], sizes.prefix_output
    )
    total = sizes.prefix_requests * (sizes.prefix_shared + sizes.prefix_own)
    return {"seconds": round(batch.seconds, 2), "cached_share": round(batch.cached_tokens / total, 3)}


# -- the host's own time -----------------------------------------------------------------------------------------------


def _host_units(sizes: Sizes) -> list[Unit]:
    return [Unit("host", {"batch": sizes.host_batch}, sizes.host_prompt + sizes.host_output, _host)]


async def _host(bench: Bench) -> Measured:
    """From the engine's own counters, between two moments at which all rows were decoding."""
    sizes, session = bench.sizes, bench.session
    earlier = session.client.stats
    await _warm_up(bench, sizes.host_batch)
    before = await _idle_stats(session, after=earlier)
    seen: list[EngineStats] = []
    watcher = asyncio.ensure_future(_watch_stats(session, sizes.host_batch, seen))
    try:
        await session.generate(bench.prompts.batch(sizes.host_batch, sizes.host_prompt), sizes.host_output)
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    if len(seen) >= 2:
        return host_times(seen[0], seen[-1])
    # Counters come a few times a second; a shorter run is counted whole.
    return {
        **host_times(before, await _idle_stats(session, after=before)),
        "note": "prefill and the last steps included",
    }


async def _idle_stats(session: EngineSession, *, after: EngineStats | None = None) -> EngineStats:
    """What the engine says when it falls idle, and has not said before."""
    for _ in range(_IDLE_POLLS):
        stats = session.client.stats
        if stats is not None and stats is not after and not stats.running and not stats.waiting:
            return stats
        await asyncio.sleep(_STATS_POLL_S)
    raise BenchError("The engine sent no statistics when it fell idle.")


async def _watch_stats(session: EngineSession, rows: int, seen: list[EngineStats]) -> None:
    while True:
        stats = session.client.stats
        if stats is not None and stats.running == rows and not stats.waiting and (not seen or seen[-1] is not stats):
            seen.append(stats)
        await asyncio.sleep(_STATS_POLL_S)


def host_times(before: EngineStats, after: EngineStats) -> Measured:
    """Milliseconds per step of every counter of seconds that the engine keeps."""
    steps = after.step_no - before.step_no
    if steps <= 0:
        raise BenchError("The engine's counters did not advance; the run was too short; raise --scale.")
    measured: Measured = {"steps": steps}
    for name in after.__struct_fields__:
        if name.endswith("_seconds"):
            spent = getattr(after, name) - getattr(before, name)
            measured[name.removesuffix("_seconds") + "_ms"] = round(1000 * spent / steps, 4)
    return measured
