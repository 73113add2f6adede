"""Long prompts and copies of them, on a simulated clock: who is refused behind them, and when one would be admitted.

Scheduler, rate measurement and admission control are the real ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from millrace.config import Config, replace
from millrace.engine.figures.rates import MeasuredRates
from millrace.errors import Overloaded
from millrace.link.engine_stats import EngineStats
from millrace.plan.figures import prefill_tokens
from millrace.plan.request import STANDARD, Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.serve.tenancy.admission import AdmissionControl

SPEED = 145.0
"""Prompt tokens per second."""
REPORT_S = 0.25
LONG = 8800
LIMIT_S = 120.0
"""Default of a standard request for its first token."""


class SlowServer:
    """A CPU that computes a chunk of 256 tokens in two seconds."""

    def __init__(self) -> None:
        self._admission = AdmissionControl(replace(Config(), server__ttft_standard_s=LIMIT_S))
        self._scheduler = Scheduler(SchedulerSettings(num_blocks=8192, block_size=16, max_running=16, token_budget=256))
        self._rates, self._stats = MeasuredRates(), EngineStats(*[0] * 13)
        self._num_requests = 0
        self.now = 0.0

    def submit(self, prompt: np.ndarray) -> None:
        self._num_requests += 1
        self._scheduler.submit(Request(self._num_requests, prompt, max_tokens=1, arrival=self.now))
        self._report()

    def run_until(self, when: float) -> None:
        """Whole steps, so it may become a little later."""
        while self.now < when:
            plan = self._scheduler.plan(self.now)
            if plan is None:
                self.now += REPORT_S
                continue
            step_s = plan.num_tokens / SPEED
            self.now += step_s
            self._rates.on_admitted(len(plan.admitted))
            self._rates.on_step(plan.num_tokens, step_s)
            self._scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 5, np.int32))
            self._report()

    def retry_after_s(self) -> float:
        """Of a small request that arrives now; 0 if it is admitted."""
        try:
            self._admission.check(self._stats, 0, STANDARD, 1)
        except Overloaded as refused:
            return refused.retry_after_s
        return 0.0

    def _report(self) -> None:
        scheduler, waiting = self._scheduler, self._scheduler.waiting
        self._rates.sample(self.now)
        self._stats = EngineStats(
            *(0, scheduler.num_running, len(waiting), *[0] * 10),
            waiting_by_class=tuple(waiting.num_by_class),
            waiting_tokens=waiting.tokens.by_class(),
            running_prefill_tokens=prefill_tokens(scheduler.rows),
            rows_free=scheduler.rows.num_free,
            admissions_per_s=self._rates.admissions_per_s(scheduler.num_running),
            tokens_per_s=self._rates.tokens_per_s,
            mean_step_s=self._rates.step_s,
        )


def prompt(seed: int, length: int = LONG) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 40_000, length).astype(np.int32)


@pytest.mark.parametrize("num_copies", [2, 8])
def test_small_requests_are_not_refused_behind_copies_of_a_running_prompt(num_copies: int) -> None:
    server = SlowServer()
    server.submit(prompt(0))
    server.run_until(4.0)
    for _ in range(num_copies):
        server.submit(prompt(0))
    for _ in range(6):
        assert server.retry_after_s() == 0
        server.run_until(server.now + 4.0)


def test_nor_behind_one_long_prompt_that_runs() -> None:
    server = SlowServer()
    server.submit(prompt(0, 4 * LONG))
    server.run_until(4.0)
    assert server.retry_after_s() == 0


@pytest.mark.parametrize("num_others", [2, 3, 4])
def test_retry_after_is_when_one_would_be_admitted(num_others: int) -> None:
    """Other long prompts are really in the way. Nothing of them is computed before the running prompt ends."""
    server = SlowServer()
    for seed in range(1 + num_others):
        server.submit(prompt(seed))
    server.run_until(4.0)
    retry_s = server.retry_after_s()
    assert retry_s > 0
    began = server.now
    while server.retry_after_s():
        server.run_until(server.now + REPORT_S)
    step_s = 256 / SPEED
    assert server.now - began == pytest.approx(retry_s, abs=2 * step_s)


def test_copies_of_a_waiting_prompt_wait_for_it_once() -> None:
    server = SlowServer()
    server.submit(prompt(0))
    server.run_until(4.0)
    for _ in range(4):
        server.submit(prompt(1))
    assert server.retry_after_s() == 0
