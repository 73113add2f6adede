"""Measures steps of a model on this machine and fits the step-time model: the engine's own scheduler makes the steps.

Prompts, decoding at several batch sizes and contexts, and both together, again and again until the time is over. A slow
machine measures the small cases only, and the range says so. A third of the runs is held out and gives the error.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from millrace.engine.cycle import Confirmed
from millrace.engine.disk.store import open_store
from millrace.errors import MillraceError
from millrace.plan.pacing.step_time import Floats, StepRates, step_parts
from millrace.simulate.profile import Profile
from millrace.simulate.real_engine import RealEngine
from millrace.simulate.requests import SimulatedRequest
from millrace.version import __version__

log = logging.getLogger(__name__)

HOLD_OUT_EVERY = 3
"""One run in so many is held out of the fit."""
DECODE_STEPS = 16
"""Tokens of each request of a case that decodes."""
MOST_ROWS = 256
"""Of a case. A machine with little memory or time measures fewer."""
SMALLEST_RATE = 1e-13
HUBER = 1.5
"""Steps further from the fit than so many robust standard deviations count less: other work disturbed them."""
MIN_STEPS = 32
LARGE_SHARE = 0.2
"""A case is left out if it is expected to take more than this share of the time."""
DISK_BYTES = 64 << 20
"""Written and read to measure the disk."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that arrive together."""

    num_rows: int
    num_prompt: int
    num_output: int

    @property
    def work(self) -> int:
        """About its tokens; a decode step counts as 16."""
        return self.num_rows * self.num_prompt + 16 * self.num_output


@dataclass(slots=True)
class Measured:
    """Steps as columns: parts, seconds, run and case of each; and the host time per step of each run."""

    parts: list[Floats] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    cases: list[int] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)


def cases_of(engine: RealEngine) -> list[Case]:
    """From a lone row to as many as the machine may run, and prompts up to three budgets; the smallest first."""
    settings, plan = engine.decided.scheduler, engine.decided.plan
    budget, room = settings.token_budget, min(plan.max_context, plan.kv_tokens) - DECODE_STEPS - 1
    prompts = [length for length in (16, 64, budget // 2, budget, 3 * budget) if 1 < length <= room]
    found = [Case(1, length, 2) for length in prompts]
    most_rows = min(settings.max_running, MOST_ROWS, plan.kv_tokens // (32 + DECODE_STEPS))
    rows = [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if count <= most_rows]
    found += [Case(count, 16, DECODE_STEPS) for count in rows]
    for count in (16, 64, 256):
        # Their prompts fill several steps; the answers are long enough for all rows to decode together in the end.
        length = min(1024, room // 2)
        num_output = count * length // (settings.mixed_budget or budget) + 2 * DECODE_STEPS
        if count <= most_rows and length + num_output <= room and count * (length + num_output) <= plan.kv_tokens:
            found.append(Case(count, length, num_output))
    for length in (budget, 3 * budget):
        found += [
            Case(count, length, DECODE_STEPS)
            for count in (1, 4, 8)
            if length <= room and count <= most_rows and count * (length + DECODE_STEPS) <= plan.kv_tokens
        ]
    return sorted(found, key=lambda case: case.work)


def measure(
    engine: RealEngine,
    minutes: float,
    on_progress: Callable[[int, int], None] = lambda runs, steps: None,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """The first run of a case warms it up and is not counted. On a slow machine it takes longer than asked for, until
    there are steps to fit and steps to hold out."""
    measured, cases, warm = Measured(), cases_of(engine), set[int]()
    limit_s, began, number, work = 60 * minutes, clock(), 0, 0
    for run in itertools.count():
        index = run % (len(cases) + 1)
        elapsed_s = clock() - began
        if elapsed_s >= limit_s and min(map(len, _split(measured))) >= MIN_STEPS:
            return measured
        noted = measured if index in warm else Measured()
        if index == len(cases):
            number = _run_mixed(engine, number, noted, run, index)
        elif not work or cases[index].work * elapsed_s / work <= LARGE_SHARE * limit_s:
            number = _run_case(engine, cases[index], number, noted, run, index)
            work += cases[index].work
        warm.add(index)
        on_progress(run + 1, len(measured.seconds))
    raise AssertionError("unreachable")


def _run_case(engine: RealEngine, case: Case, number: int, measured: Measured, run: int, index: int) -> int:
    replica = engine.replica(_recorder(measured, run, index))
    for _ in range(case.num_rows):
        replica.submit(number, SimulatedRequest(0.0, case.num_prompt, case.num_output))
        number += 1
    replica.run_until(math.inf)
    measured.host_s.append(replica.host_s / max(1, replica.num_steps))
    return number


def _run_mixed(engine: RealEngine, number: int, measured: Measured, run: int, index: int) -> int:
    """Prompts that arrive while others decode."""
    replica = engine.replica(_recorder(measured, run, index))
    rng, budget = np.random.default_rng(run), engine.decided.scheduler.token_budget
    for _ in range(5):
        length = int(rng.integers(2, min(budget // 2, engine.decided.plan.max_context - 64)))
        replica.submit(number, SimulatedRequest(0.0, length, 30))
        number += 1
        for _ in range(4):
            replica.run_until(replica.now + 1e-9)  # One step.
    replica.run_until(math.inf)
    return number


def _recorder(measured: Measured, run: int, index: int) -> Callable[[Confirmed], None]:
    def note(done: Confirmed) -> None:
        if done.device_s <= 0:
            return
        measured.parts.append(step_parts(done.plan))
        measured.seconds.append(done.device_s)
        measured.runs.append(run)
        measured.cases.append(index)

    return note


@dataclass(frozen=True, slots=True)
class Fit:
    rates: StepRates
    error: float
    """Relative, of held-out steps: root mean square without the outermost twentieth, which other work disturbed."""
    noise: float
    range: tuple[float, float, float, float, float]
    num_steps: int


def fit(measured: Measured) -> Fit:
    """The rates that predict the steps best, relative to how long they take."""
    parts, seconds = np.array(measured.parts), np.array(measured.seconds)
    fitted, held_out = _split(measured)
    if min(len(fitted), len(held_out)) < MIN_STEPS:
        raise MillraceError(f"Only {len(seconds)} steps were measured; give calibrate more --minutes.")
    rates = fit_rates(parts[fitted], seconds[fitted])
    errors = np.sort(np.abs(parts[held_out] @ rates / seconds[held_out] - 1))
    kept = errors[: max(1, int(0.95 * len(errors)))]
    largest = parts.max(axis=0).tolist()
    return Fit(
        StepRates(*rates.tolist()),
        float(np.sqrt((kept**2).mean())),
        _noise(parts, seconds, np.array(measured.cases)),
        (largest[0], largest[1], largest[2], largest[3], largest[4]),
        len(seconds),
    )


def _split(measured: Measured) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Steps to fit and steps held out, by a hash of their run: a fixed stride could hold out the same cases always."""
    runs = np.array(measured.runs, np.int64)
    is_held_out = runs * 2_654_435_761 % 2**32 % HOLD_OUT_EVERY == 0
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def fit_rates(parts: Floats, seconds: Floats) -> Floats:
    """Non-negative least squares of relative errors; outliers count less."""
    relative = parts / seconds[:, None]
    weights = np.ones(len(seconds))
    rates: Floats = np.zeros(parts.shape[1])
    for _ in range(12):
        rates = _non_negative(relative * weights[:, None], weights)
        residual = relative @ rates - 1
        spread = max(1.4826 * float(np.median(np.abs(residual - np.median(residual)))), 1e-4)
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-12)))
    return np.maximum(rates, SMALLEST_RATE)


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares by an active set: the most negative rate is set to 0 until none is negative."""
    active = list(range(matrix.shape[1]))
    found: Floats = np.zeros(matrix.shape[1])
    while active:
        chosen = matrix[:, active]
        scale = np.maximum(np.linalg.norm(chosen, axis=0), 1e-300)
        solved = np.linalg.lstsq(chosen / scale, target, rcond=None)[0] / scale
        if (solved >= 0).all():
            found[active] = solved
            return found
        active.pop(int(np.argmin(solved * scale)))
    return found


def _noise(parts: Floats, seconds: Floats, cases: npt.NDArray[np.int64]) -> float:
    """Spread of steps of one case that decode the same number of rows."""
    spreads = []
    for group in _groups(parts, cases):
        logs = np.log(seconds[group])
        spreads.append(1.4826 * float(np.median(np.abs(logs - np.median(logs)))))
    return float(np.median(spreads)) if spreads else 0.0


def _groups(parts: Floats, cases: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    is_decode = parts[:, 1] == 0
    for case in np.unique(cases).tolist():
        rows = parts[:, 2].max() if not len(parts) else parts[cases == case, 2].max()
        group = np.flatnonzero((cases == case) & is_decode & (parts[:, 2] == rows))
        if len(group) >= 8:
            yield group


def profile_of(engine: RealEngine, measured: Measured, found: Fit, model: str, note: str) -> Profile:
    decided, facts = engine.decided, engine.facts
    settings, plan = decided.scheduler, decided.plan
    return Profile(
        model=model,
        device=decided.device.name(),
        source="measured",
        note=f"{note}; {found.num_steps:,} steps, Millrace {__version__}",
        rates=found.rates,
        host_s=float(np.median(measured.host_s)),
        error=found.error,
        noise=found.noise,
        range=found.range,
        steps_in_flight=facts.steps_in_flight,
        slow_step_s=None if math.isinf(facts.slow_step_s) else facts.slow_step_s,
        step_ms=1e3 * settings.target.step_s if settings.target is not None else 0.0,
        max_running=settings.max_running,
        token_budget=settings.token_budget,
        mixed_budget=settings.mixed_budget,
        max_context=plan.max_context,
        kv_tokens=plan.kv_tokens,
        kv_token_bytes=plan.block_bytes // settings.block_size,
        copy_bytes_per_s=_copy_rate() if not decided.device.defaults.has_own_memory else 25e9,
        copy_batch_bytes=decided.device.defaults.copy_batch_bytes,
        disk_bytes_per_s=disk_rate(plan.block_bytes),
        pads_drafts=decided.device.defaults.pads_drafts,
    )


def _copy_rate() -> float:
    """Of host memory, where the KV pool is in host memory too."""
    source, target = np.ones(1 << 24, np.uint8), np.zeros(1 << 24, np.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return len(source) / min(times)


def disk_rate(block_bytes: int) -> float:
    """Of the disk with the directory for temporary files, without the system's cache; 0 if it cannot be measured."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _rate_in(Path(folder), block_bytes)
    except OSError as error:
        log.warning(
            "The disk was not measured: %s. The profile has no rate of a disk: give disk_gb_per_s to simulations with"
            " one, or set TMPDIR to a directory with %d MiB free and calibrate again.",
            error,
            DISK_BYTES >> 20,
        )
        return 0.0


def _rate_in(folder: Path, block_bytes: int) -> float:
    """Raises OSError."""
    count, block = max(1, DISK_BYTES // block_bytes), bytearray(block_bytes)
    store = open_store(folder, num_slots=count, block_bytes=block_bytes, name_bytes=1)
    if store is None:
        return 0.0
    with contextlib.closing(store):
        for slot in range(count):
            store.write(slot, b"x", [memoryview(block)])
        with (folder / "blocks").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for slot in range(count):
            store.read(slot, b"x", [memoryview(block)])
        return count * block_bytes / (time.perf_counter() - began)
