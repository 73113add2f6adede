"""Samples the front and the engine's last report each second, and measures how late the event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from aiohttp import web

from millrace.observe.history import SAMPLE_EVERY_S, FrontCounts, Sample
from millrace.serve.state import STATE, FrontState

TICK_S = 0.25


async def run_sampler(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(_sample(app[STATE]))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _sample(state: FrontState) -> None:
    worst, due = 0.0, time.monotonic()
    while True:
        take_sample(state, worst)
        worst, due = 0.0, max(due + SAMPLE_EVERY_S, time.monotonic())
        while (now := time.monotonic()) < due:
            wait_s = min(TICK_S, due - now)
            await asyncio.sleep(wait_s)
            lag_s = max(0.0, time.monotonic() - now - wait_s)
            state.metrics.loop_lag.observe(lag_s)
            worst = max(worst, lag_s)


def take_sample(state: FrontState, loop_lag_s: float) -> None:
    counts = state.metrics.counts
    front = FrontCounts(counts.requests, counts.errors, counts.client_errors, counts.refused, loop_lag_s)
    now = time.time()
    state.history.add(Sample(now, state.client.stats, front))
    state.metrics.slos.sample(now, state.client.stats)
