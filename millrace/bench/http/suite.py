"""Runs every workload in turn, on a running server or on one started for the benchmark."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from millrace.bench.figures import Figure
from millrace.bench.http.cpu_share import CpuShare
from millrace.bench.http.drive import drive, warm_up
from millrace.bench.http.perplexity import UnsupportedByServer, measure_perplexity
from millrace.bench.http.prompts import IdPrompts, PromptMaker
from millrace.bench.http.target import Target
from millrace.bench.http.workload_figures import figures_of
from millrace.bench.http.workloads import Workload
from millrace.bench.local_server import LocalServer, cpu_seconds, resident_mib

_IDLE_WATCH_S = 2.0

Report = Callable[[Figure], None]
Progress = Callable[[str, int, int], None]
"""Called with what is running, requests done, requests in total."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    workloads: tuple[Workload, ...]
    seed: int
    time_limit_s: float
    pid: int = 0
    """Process whose memory and CPU time to report; 0 = none."""
    perplexity: bool = False
    """Also measure perplexity, after the workloads."""


async def run_remote(target: Target, options: SuiteOptions, report: Report, progress: Progress) -> None:
    """Measure a server that is already running."""
    async with target:
        prompts = await target.probe(options.seed)
        for figure in about_server(target, prompts):
            report(figure)
        if options.pid:
            report(Figure("server", "memory at rest", resident_mib(options.pid), "MiB"))
        await _run_workloads(target, prompts, options, report, progress)
        if options.pid:
            report(Figure("server", "memory afterwards", resident_mib(options.pid), "MiB"))


async def run_local(server_options: Sequence[str], options: SuiteOptions, report: Report, progress: Progress) -> None:
    """Start `millrace serve` with `server_options`, measure it including its start, and stop it."""
    progress("starting the server", 0, 1)
    with LocalServer(server_options) as server:
        ready_s = await server.wait_ready()
        async with Target(server.url) as target:
            await target.find_model()
            first = await target.complete("Hello", 1)
            report(Figure("server", "start to ready", ready_s, "s"))
            report(Figure("server", "start to first token", first.ended_at - server.started_at, "s", note=first.error))
            prompts = await target.probe(options.seed)
            report(Figure("server", "memory at rest", resident_mib(server.pid), "MiB"))
            report(Figure("server", "CPU at idle", await _idle_percent(server.pid), "%"))
            await _run_workloads(target, prompts, replace(options, pid=server.pid), report, progress)
            report(Figure("server", "memory afterwards", resident_mib(server.pid), "MiB"))


async def _run_workloads(
    target: Target, prompts: PromptMaker, options: SuiteOptions, report: Report, progress: Progress
) -> None:
    await warm_up(target, prompts)
    for workload in options.workloads:

        def on_done(done: int, total: int, name: str = workload.name) -> None:
            progress(name, done, total)

        progress(workload.name, 0, len(workload.shapes))
        share = CpuShare(options.pid) if options.pid else None
        outcome = await drive(target, workload, prompts, time_limit_s=options.time_limit_s, on_done=on_done)
        for figure in figures_of(outcome):
            report(figure)
        if share is not None:
            tokens = sum(sample.output_tokens for sample in outcome.good)
            for figure in share.figures(workload.name, workload.concurrency, tokens):
                report(figure)
    if options.perplexity:
        progress("perplexity", 0, 1)
        report(await perplexity_figure(target, options.time_limit_s, progress))


async def perplexity_figure(target: Target, time_limit_s: float, progress: Progress) -> Figure:
    """The perplexity figure, or a figure without a value whose note says why."""
    try:
        async with asyncio.timeout(time_limit_s):
            found = await measure_perplexity(target, on_done=lambda done, total: progress("perplexity", done, total))
    except UnsupportedByServer as error:
        return Figure("quality", "perplexity", math.nan, "", note=f"not measured: {error}")
    except TimeoutError:
        return Figure("quality", "perplexity", math.nan, "", note=f"not completed within {time_limit_s:g} s")
    return Figure("quality", "perplexity", found.value, "", found.scored_tokens)


def about_server(target: Target, prompts: PromptMaker) -> Iterable[Figure]:
    """Features that the server lacks, as notes: each changes what the figures mean."""
    if not target.accepts.ignore_eos:
        yield Figure("server", "ignore_eos", 0, "", note="refused: answers may end early; compare tok/s, not wall time")
    if not target.accepts.usage:
        yield Figure("server", "usage", 0, "", note="refused: each event counts as one token")
    if target.accepts.chat_only:
        yield Figure("server", "completions", 0, "", note="missing: measured through the chat endpoint")
    if not isinstance(prompts, IdPrompts):
        yield Figure("server", "token ids", 0, "", note="not accepted: prompt lengths are approximate")


async def _idle_percent(pid: int) -> float:
    """CPU use of the idle server, in percent of one core."""
    await asyncio.sleep(0.5)
    before, started = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(_IDLE_WATCH_S)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - started)
