"""Time of a CPU step by kind of work, from the counters of the native step.

No server takes part: plans are made here and given to the runner. The fastest of many steps is shown; slower ones were
disturbed by other work on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millrace.bench.figures import Figure
from millrace.config import Config
from millrace.errors import ConfigError
from millrace.models.load import has_quantised_weights, load_decoder
from millrace.models.native_stack import KINDS
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.cpu.native_step import NativeStep
from millrace.run.device.device import CpuDevice
from millrace.run.device.kv_pool import resolve_kv_dtype
from millrace.run.device.precision import choose_precision
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings
from millrace.sources.resolve import resolve_model

BLOCK_SIZE = 16
PRODUCTS = ("qkv", "attention", "out", "gate_up", "down", "head")
"""Matrix products and attention."""


@dataclass(frozen=True, slots=True)
class StepCase:
    name: str
    num_rows: int
    context: int
    """Tokens of each row in the cache before the step."""
    count: int
    """Tokens of each row in the step."""
    repetitions: int
    shared: int = 0
    """Length of the prefix that all rows share, in tokens; a multiple of the block size."""


CASES = (
    StepCase("1 row at 512 tokens", 1, 512, 1, 100),
    StepCase("16 rows at 300 tokens", 16, 300, 1, 40),
    StepCase("8 rows at 1,056 tokens", 8, 1056, 1, 30),
    StepCase("8 rows, 1,024 of 1,056 tokens shared", 8, 1056, 1, 30, shared=1024),
    StepCase("prompt of 512 tokens", 1, 0, 512, 10),
)


@dataclass(frozen=True, slots=True)
class StepCost:
    case: StepCase
    wall_ms: float
    """The whole step, from launch to result."""
    kinds_ms: dict[str, float]

    @property
    def python_ms(self) -> float:
        return self.wall_ms - sum(self.kinds_ms.values())

    @property
    def products_share(self) -> float:
        return sum(self.kinds_ms[kind] for kind in PRODUCTS) / self.wall_ms

    def figures(self) -> list[Figure]:
        name, share = self.case.name, f"products and attention {100 * self.products_share:.0f}%"
        parts = {**self.kinds_ms, "python and hand-over": self.python_ms}
        notes = {kind: f"{100 * ms / self.wall_ms:.1f}%" for kind, ms in parts.items()}
        rows = [Figure(name, kind, ms, "ms", note=notes[kind]) for kind, ms in parts.items()]
        return [Figure(name, "step", self.wall_ms, "ms", note=share), *rows]


def step_figures(config: Config) -> Iterator[Figure]:
    for cost in measure_steps(config):
        yield from cost.figures()


def measure_steps(config: Config, cases: tuple[StepCase, ...] = CASES) -> Iterator[StepCost]:
    """Load the model and measure each case that its context has room for."""
    files = resolve_model(config.model.source)
    spec = spec_from_config(files.config)
    device = CpuDevice(config.run.threads)
    precision = choose_precision(config.model, device, has_quantised_weights(files))
    dtype = precision.dtype
    kv_dtype = resolve_kv_dtype(
        config.memory.kv_dtype,
        spec,
        dtype=dtype,
        device=device.torch_device,
        has_int8_products=precision.quantization == "int8",
    )
    decoder = load_decoder(
        files, device=device.torch_device, dtype=dtype, seed=config.model.seed, quantization=precision.quantization
    )
    stack = decoder.native_stack
    if stack is None or not stack.can_run_whole_steps:
        raise ConfigError(
            f"{files.name} cannot run as a native step, which needs a C++ compiler and a dense model with tied"
            " embeddings. Try the default model."
        )
    try:
        for case in cases:
            length = case.context + case.count + case.repetitions
            if length > spec.max_context:
                continue
            blocks = -(-length // BLOCK_SIZE)
            runner = Runner(
                decoder,
                device,
                RunnerSettings(
                    num_blocks=case.num_rows * blocks,
                    block_size=BLOCK_SIZE,
                    max_rows=case.num_rows,
                    max_context=blocks * BLOCK_SIZE,
                    kv_dtype=kv_dtype,
                ),
            )
            assert runner.native_step is not None
            yield _measure(runner, runner.native_step, case, blocks, spec.vocab_size)
    finally:
        device.close()


def _measure(runner: Runner, native_step: NativeStep, case: StepCase, blocks: int, vocab_size: int) -> StepCost:
    tokens = np.random.default_rng(0).integers(0, vocab_size, max(1, case.context + case.count)).astype(np.int32)
    params = RowParams(SamplingParams(temperature=0.0))
    admitted = tuple(Admission(row, row, tokens, len(tokens), params) for row in range(case.num_rows))
    first = _plan(case.num_rows, 0, max(1, case.context), admitted, blocks, case.shared // BLOCK_SIZE)
    runner.launch(first).wait()
    spent, best = native_step.measure(), (float("inf"), [0] * len(KINDS))
    for repetition in range(case.repetitions):
        start = case.context + (repetition if case.count == 1 else 0)
        plan = _plan(case.num_rows, start, case.count)
        spent.zero_()
        began = time.perf_counter()
        runner.launch(plan).wait()
        best = min(best, (time.perf_counter() - began, spent.tolist()))
    return StepCost(case, best[0] * 1e3, {kind: ns / 1e6 for kind, ns in zip(KINDS, best[1], strict=True)})


def _plan(
    num_rows: int, start: int, count: int, admitted: tuple[Admission, ...] = (), blocks: int = 0, num_shared: int = 0
) -> StepPlan:
    """A plan with `count` tokens of every row. With admissions it also assigns all blocks; the first `num_shared` are
    shared by all rows, which is safe because their tokens are equal."""
    rows = np.arange(num_rows, dtype=np.int32)
    block_ids = 1 + np.arange(num_rows * blocks, dtype=np.int32).reshape(num_rows, blocks)
    counts = np.full(num_rows, count, np.int32)
    block_ids[:, :num_shared] = block_ids[:1, :num_shared]
    return StepPlan(
        step_no=0,
        rows=rows,
        starts=np.full(num_rows, start, np.int32),
        counts=counts,
        samples=np.ones(num_rows, np.bool_),
        block_rows=np.repeat(rows, blocks),
        block_cols=np.tile(np.arange(blocks, dtype=np.int32), num_rows),
        block_ids=block_ids.reshape(-1),
        shape=exact_shape(counts),
        admitted=admitted,
    )
