"""Host time of the scheduler: plan plus apply of a steady decode step with 1 to 4,096 rows, the planning part of a
first token with cold CPU caches, and the time to write and to read a steady step as bytes.

No device takes part. Rows are staggered within their blocks, as in real traffic, so that each step crosses its share of
block boundaries. The bars are 0.3 ms at 256 rows and 1 ms at 2,048.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millrace.bench.figures import Figure
from millrace.plan.codec.decoder import StepDecoder
from millrace.plan.codec.encoder import StepEncoder
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings

SIZES = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096)
BARS_MS = {256: 0.3, 2048: 1.0}
BLOCK_SIZE = 16
PROMPTS = (128, 1024, 2048)
CODEC_SIZES = (1, 256, 2048)
SWEEP_LENGTH = 6_000_000
"""Numbers of 8 bytes: enough to evict everything else from the caches."""


def plan_figures() -> Iterator[Figure]:
    for num_rows in SIZES:
        cost = measure_plan_cost(num_rows)
        bar = f", bar {BARS_MS[num_rows]} ms" if num_rows in BARS_MS else ""
        note = f"plan {cost.plan_ms:.3f} + apply {cost.apply_ms:.3f}{bar}"
        yield Figure("plan", f"{num_rows:,} rows", cost.total_ms, "ms", note=note)
    for num_tokens in PROMPTS:
        first = measure_first_cost(num_tokens)
        note = f"plan {first.plan_ms:.3f} + confirm {first.confirm_ms:.3f}, caches cold"
        yield Figure("first token", f"prompt of {num_tokens:,}", first.total_ms, "ms", note=note)
    for num_rows in CODEC_SIZES:
        codec = measure_codec_cost(num_rows)
        note = f"decode {codec.decode_us:.1f} µs; {codec.num_bytes} bytes with {codec.num_updates} block updates"
        yield Figure("encode a step", f"{num_rows:,} rows", codec.encode_us, "µs", note=note)


@dataclass(frozen=True, slots=True)
class PlanCost:
    num_rows: int
    plan_ms: float
    apply_ms: float

    @property
    def total_ms(self) -> float:
        return self.plan_ms + self.apply_ms


def measure_plan_cost(num_rows: int, num_steps: int = 200) -> PlanCost:
    """Median over `num_steps` steady steps, with one step in flight as in the engine."""
    scheduler = _decoding(num_rows, num_steps)
    in_flight = scheduler.plan(0.0)
    plan_s, apply_s = [], []
    for step in range(num_steps + 20):
        started = time.perf_counter()
        upcoming = scheduler.plan(float(step))
        planned = time.perf_counter()
        if in_flight is None or upcoming is None:
            raise AssertionError("a steady decode never runs dry")
        tokens = np.full(int(in_flight.samples.sum()), 7, np.int32)
        applying = time.perf_counter()
        scheduler.apply(in_flight.step_no, tokens)
        apply_s.append(time.perf_counter() - applying)
        plan_s.append(planned - started)
        in_flight = upcoming
    return PlanCost(num_rows, float(np.median(plan_s[20:])) * 1e3, float(np.median(apply_s[20:])) * 1e3)


def _decoding(num_rows: int, num_steps: int) -> Scheduler:
    """A scheduler whose rows all decode after the first step."""
    max_tokens = num_steps + 64
    scheduler = Scheduler(
        SchedulerSettings(
            num_blocks=num_rows * (-(-(max_tokens + 2 * BLOCK_SIZE) // BLOCK_SIZE) + 1),
            block_size=BLOCK_SIZE,
            max_running=num_rows,
            token_budget=num_rows * 2 * BLOCK_SIZE,
        )
    )
    for index in range(num_rows):
        prompt = np.full(BLOCK_SIZE + index % BLOCK_SIZE, index, np.int32)
        scheduler.submit(Request(id=index, prompt=prompt, max_tokens=max_tokens, end_token_ids=(2, 3)))
    return scheduler


@dataclass(frozen=True, slots=True)
class CodecCost:
    """A repeated step as bytes."""

    encode_us: float
    decode_us: float
    num_bytes: int
    """Most of any step; `num_updates` are of the same step."""
    num_updates: int


def measure_codec_cost(num_rows: int, num_steps: int = 200) -> CodecCost:
    """Median over `num_steps` steady steps."""
    scheduler, encoder, decoder = _decoding(num_rows, num_steps), StepEncoder(), StepDecoder()
    encode_s, decode_s, sizes = [], [], []
    for step in range(num_steps + 20):
        plan = scheduler.plan(float(step))
        if plan is None:
            raise AssertionError("a steady decode never runs dry")
        started = time.perf_counter()
        data = encoder.plan(plan)
        encoded = time.perf_counter()
        decoder.decode(data)
        decode_s.append(time.perf_counter() - encoded)
        encode_s.append(encoded - started)
        sizes.append((len(data), len(plan.block_ids)))
        scheduler.apply(plan.step_no, np.full(int(plan.samples.sum()), 7, np.int32))
    return CodecCost(float(np.median(encode_s[20:])) * 1e6, float(np.median(decode_s[20:])) * 1e6, *max(sizes[20:]))


@dataclass(frozen=True, slots=True)
class FirstCost:
    """A lone request: from its arrival to the plan of its prompt, and from its token to the outcome."""

    num_tokens: int
    plan_ms: float
    confirm_ms: float

    @property
    def total_ms(self) -> float:
        return self.plan_ms + self.confirm_ms


def measure_first_cost(num_tokens: int, num_requests: int = 40) -> FirstCost:
    """Median over lone requests, one after the other, each with its own prompt. The CPU caches are swept before each
    part; work that overlaps with the device is left out."""
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=50_000, block_size=BLOCK_SIZE, max_running=256, token_budget=8192)
    )
    random, swept = np.random.default_rng(0), np.zeros(SWEEP_LENGTH)
    plan_s, confirm_s = [], []
    for index in range(num_requests):
        request = Request(id=index, prompt=random.integers(0, 100_000, num_tokens).astype(np.int32), max_tokens=1)
        token = np.array([7], np.int32)
        swept += 1.0
        started = time.perf_counter()
        scheduler.submit(request)
        plan = scheduler.plan(0.0)
        plan_s.append(time.perf_counter() - started)
        if plan is None or plan.num_tokens != num_tokens:
            raise AssertionError("a lone prompt is computed at once")
        scheduler.prepare_outcome()
        swept += 1.0
        started = time.perf_counter()
        scheduler.confirm(plan.step_no, token)
        confirm_s.append(time.perf_counter() - started)
        scheduler.run_deferred()
    return FirstCost(num_tokens, float(np.median(plan_s)) * 1e3, float(np.median(confirm_s)) * 1e3)
