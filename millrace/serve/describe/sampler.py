"""Samples the front and the last report of each engine each second, and measures how late the event loop runs. Streams
that wait for an engine are kept alive with comments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from aiohttp import web

from millrace.observe.history import SAMPLE_EVERY_S, FrontCounts, Sample
from millrace.serve.describe.kept_objectives import SAVE_EVERY_S, KeptObjectives
from millrace.serve.state import STATE, FrontState

TICK_S = 0.25
COMMENT_EVERY_S = 3.0


async def run_sampler(app: web.Application) -> AsyncIterator[None]:
    kept = KeptObjectives(app[STATE])
    sampler = Sampler(app[STATE], asyncio.get_running_loop(), kept)
    yield
    sampler.stop()
    take_sample(app[STATE], 0.0)
    kept.save()


class Sampler:
    """Timers rather than a task: what they cost is a call, four times a second."""

    def __init__(self, state: FrontState, loop: asyncio.AbstractEventLoop, kept: KeptObjectives) -> None:
        self._state = state
        self._loop = loop
        self._kept = kept
        self._save_due = loop.time() + SAVE_EVERY_S
        self._worst_lag_s = 0.0
        self._sample_due = loop.time()
        self._due = loop.time()
        self._comment_due = loop.time()
        self._timer: asyncio.Handle = loop.call_soon(self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        lag_s = max(0.0, now - self._due)
        self._state.metrics.loop_lag.observe(lag_s)
        self._worst_lag_s = max(self._worst_lag_s, lag_s)
        if now >= self._sample_due:
            take_sample(self._state, self._worst_lag_s)
            self._worst_lag_s, self._sample_due = 0.0, max(self._sample_due + SAMPLE_EVERY_S, now)
        if now >= self._save_due:
            self._save_due = now + SAVE_EVERY_S
            self._kept.save_soon(self._loop)
        if now >= self._comment_due:
            self._comment_due = now + COMMENT_EVERY_S
            if any(model.client.requests.is_waiting for model in self._state.models):
                for job in list(self._state.jobs):
                    job.comment()
        self._due = now + TICK_S
        self._timer = self._loop.call_at(self._due, self._tick)


def take_sample(state: FrontState, loop_lag_s: float) -> None:
    counts = state.metrics.counts
    front = FrontCounts(
        counts.requests, counts.errors, counts.client_errors, counts.refused, loop_lag_s, counts.asked, counts.failed
    )
    now = time.time()
    for figures in state.metrics.models.values():
        figures.history.add(Sample(now, figures.engine.stats, front, figures.engine.latencies.take()))
        figures.sample_objectives(now, counts.asked, counts.failed)
