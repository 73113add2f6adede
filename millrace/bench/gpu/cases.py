"""The cases of `millrace bench gpu`: decode, TTFT, mixed load, shared prefix, host time.

The workloads are those of the recorded peer figures. Each `Unit` is one figure and can fail alone.
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
from millrace.link.engine_stats import EngineStats

Measured = dict[str, object]
BATCHES = (1, 8, 32, 128, 256)
CASES = ("startup", "decode", "ttft", "mixed", "prefix", "host")

_WARM_UP_FULL_ROWS = 32
_WARM_UP_SHORT = 16
_WARM_UP_OUTPUT = 8
_REPEATS, _REPEATED_BATCH = 3, 32
"""Runs per decode figure, for batches up to this size: the difference of two short runs is noisy."""
_STATS_POLL_S = 0.01
_IDLE_POLLS = 500


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of every workload, in tokens and requests."""

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
        """Every size but the batches times `factor`, at least 4."""

        def scale(value: int) -> int:
            return max(4, round(value * factor))

        changes: dict[str, Any] = {
            field.name: tuple(dict.fromkeys(map(scale, value))) if isinstance(value, tuple) else scale(value)
            for field in dataclasses.fields(self)
            if field.name != "batches"
            for value in (getattr(self, field.name),)
        }
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a unit needs: an engine, new prompts, sizes."""

    session: EngineSession
    prompts: Prompts
    sizes: Sizes
    quick: bool


@dataclass(frozen=True, slots=True)
class Unit:
    case: str
    about: dict[str, int]
    """Keys of the JSON line that distinguish it within its case."""
    context: int
    """Tokens that its longest request needs."""
    run: Callable[[Bench], Awaitable[Measured]]


def units(cases: Iterable[str], sizes: Sizes, *, quick: bool) -> list[Unit]:
    """All figures to measure on one running engine, in order, without the start."""
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
    """The median of a few runs; a single run for large batches, which are long and steady."""
    await _warm_up(bench, batch)
    repeats = 1 if bench.quick or batch > _REPEATED_BATCH else _REPEATS
    runs = sorted([await _decode_once(bench, batch) for _ in range(repeats)], key=lambda run: run["tpot_ms"])
    return {**runs[repeats // 2], "repeats": repeats}


async def _decode_once(bench: Bench, batch: int) -> dict[str, Any]:
    """Time per step measured in two ways; `tpot_ms` is the slower.

    `tpot_diff_ms` is computed as for the peer, (T(n) - T(1)) / (n - 1) over two whole runs: it does not depend on when
    tokens are delivered, but at large batches it includes steps in which some rows have ended. `step_ms` is wall time
    per step while all rows run, from token arrivals: exact at large batches, but delivery may lag.
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
        measured["note"] = "some rows ended before the last one began: the batch was never full"
    return measured


async def _warm_up(bench: Bench, batch: int) -> None:
    """Like decode with few output tokens; beyond a number of rows with short prompts, to save time."""
    sizes, ready = bench.sizes, bench.session.ready
    outputs = min(_WARM_UP_OUTPUT, sizes.decode_output)
    length = max(1, min(sizes.decode_prompt, ready.max_context - outputs, ready.kv_tokens - outputs))
    full = min(batch, _WARM_UP_FULL_ROWS)
    prompts = bench.prompts.batch(full, length) + bench.prompts.batch(batch - full, min(_WARM_UP_SHORT, length))
    await bench.session.generate(prompts, outputs)


def _no_hits(cached_tokens: int) -> None:
    if cached_tokens:
        raise BenchError(f"{cached_tokens} prompt tokens came from the prefix cache although all prompts were new.")


# -- first tokens ------------------------------------------------------------------------------------------------------


def _ttft_units(sizes: Sizes) -> list[Unit]:
    def unit(num_tokens: int) -> Unit:
        return Unit("ttft", {"prompt": num_tokens}, num_tokens + 1, lambda b: _ttft(b, num_tokens))

    return [unit(num_tokens) for num_tokens in sizes.ttft_prompts]


async def _ttft(bench: Bench, num_tokens: int) -> Measured:
    """Median over new prompts after one warm-up, as seen by the client."""
    repeats = 2 if bench.quick else 7 if num_tokens <= 2048 else 5 if num_tokens <= 8192 else 3
    times = [await _first_token_ms(bench, bench.prompts.make(num_tokens)) for _ in range(repeats + 1)][1:]
    every = [round(time, 2) for time in times]
    return {"ms": round(statistics.median(times), 2), "best_ms": min(every), "repeats": repeats, "every_ms": every}


async def _first_token_ms(bench: Bench, prompt: list[int], *, fresh: bool = True) -> float:
    batch = await bench.session.generate([prompt], 1)
    if fresh:
        _no_hits(batch.cached_tokens)
    elif not batch.cached_tokens:
        raise BenchError("No prompt token came from the prefix cache although the prefix was sent before.")
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
    """TTFT of a prompt with a cached prefix, and of an all-new prompt."""
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
    """Host time from the engine's counters, between two reports in which all rows were decoding."""
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
    # The engine reports a few times per second; a shorter run is counted as a whole.
    return {
        **host_times(before, await _idle_stats(session, after=before)),
        "note": "prefill and the last steps included",
    }


async def _idle_stats(session: EngineSession, *, after: EngineStats | None = None) -> EngineStats:
    """The next report of an idle engine that is not `after`."""
    for _ in range(_IDLE_POLLS):
        stats = session.client.stats
        if stats is not None and stats is not after and not stats.running and not stats.waiting:
            return stats
        await asyncio.sleep(_STATS_POLL_S)
    raise BenchError("The engine sent no statistics when it became idle.")


async def _watch_stats(session: EngineSession, rows: int, seen: list[EngineStats]) -> None:
    while True:
        stats = session.client.stats
        if stats is not None and stats.running == rows and not stats.waiting and (not seen or seen[-1] is not stats):
            seen.append(stats)
        await asyncio.sleep(_STATS_POLL_S)


def host_times(before: EngineStats, after: EngineStats) -> Measured:
    """Milliseconds per step for each of the engine's time counters."""
    steps = after.step_no - before.step_no
    if steps <= 0:
        raise BenchError("The engine's counters did not advance: the run was too short. Raise --scale.")
    measured: Measured = {"steps": steps}
    for name in after.__struct_fields__:
        if name.endswith("_seconds"):
            spent = getattr(after, name) - getattr(before, name)
            measured[name.removesuffix("_seconds") + "_ms"] = round(1000 * spent / steps, 4)
    return measured
