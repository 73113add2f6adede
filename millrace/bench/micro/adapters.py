"""What adapters cost: steps of one runner with none, one and many of them, in alternating rounds.

No server takes part: plans are made here and given to the runner, two in flight. The model's own weights, or random
ones of its shape; adapters are random. The cache holds zeros, which cost what other values cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from millrace.bench.figures import Figure
from millrace.config import Config
from millrace.engine.build import build_runner
from millrace.models.adapters.read import Adapter
from millrace.models.adapters.slots import AdapterSlots
from millrace.models.adapters.targets import NUM_KINDS, QKV
from millrace.ops.lora.weights import LinearLora, LoraPart, join, pack
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.shapes.choice import ShapeChoice
from millrace.plan.shapes.declared import StepSizes
from millrace.plan.shapes.heads import DueRows
from millrace.plan.step import ALL_LINEARS, QKV_ALONE, Admission, StepPlan
from millrace.run.device.kv_pool import untouched_zeros
from millrace.run.protocol import AnyRunner
from millrace.run.ranks.slot_fills import TakesAdapters

RANK, MAX_ADAPTERS = 16, 64
Q_AND_V, ALL = "queries and values", "all linears"
WARM_STEPS = 3
"""The first step compiles, the second one captures."""
COPY_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    context: int
    """Tokens of each row in the cache before the step."""
    count: int
    """Tokens of each row in the step."""
    adapters: tuple[int, ...]
    """How many different ones the rows have."""
    steps: int
    """In one round."""
    bars: tuple[tuple[str, float], ...]
    """(targets, what a step with adapters may take of a step without)"""


GPU_CASES = (
    Case("64 rows at 512 tokens", 64, 512, 1, (1, 8, 64), 40, ((Q_AND_V, 1.10),)),
    Case("1 row at 512 tokens", 1, 512, 1, (1,), 40, ((Q_AND_V, 1.12), (ALL, 1.12))),
    Case("prompt of 1,024 tokens", 1, 0, 1024, (1,), 10, ((Q_AND_V, 1.10), (ALL, 1.10))),
)
CPU_CASES = (
    Case("16 rows at 300 tokens", 16, 300, 1, (1, 4, 16), 6, ((Q_AND_V, 1.15), (ALL, 1.15))),
    Case("1 row at 300 tokens", 1, 300, 1, (1,), 12, ((Q_AND_V, 1.15), (ALL, 1.15))),
    Case("prompt of 512 tokens", 1, 0, 512, (1,), 1, ((Q_AND_V, 1.15), (ALL, 1.15))),
)


def adapter_figures(config: Config, cases: Sequence[Case] = (), rounds: int = 5) -> Iterator[Figure]:
    """`cases`: by default those of the device."""
    decided, runner = build_runner(_with_room(config, cases or (*GPU_CASES, *CPU_CASES)))
    try:
        slots = runner.slots
        assert slots is not None
        cases = cases or (GPU_CASES if decided.device.kind == "cuda" else CPU_CASES)
        bench = _Steps(runner, ShapeChoice(runner.facts.shapes), decided.spec.vocab_size, config.plan.block_size)
        for targets in (Q_AND_V, ALL):
            bench.targets = targets
            for slot in range(1, 1 + max(max(case.adapters) for case in cases)):
                fill(runner, slot, random_adapter(slots, targets, slot))
            for case in cases:
                yield from _figures(bench, case, targets, rounds)
    finally:
        decided.device.close()


def _with_room(config: Config, cases: Sequence[Case]) -> Config:
    """For all rows of the largest case, whose blocks are never freed."""
    length = max(case.context + case.count + case.steps + WARM_STEPS + 1 for case in cases)
    rows, size = max(case.rows for case in cases), config.plan.block_size
    return replace(
        config,
        adapters=replace(config.adapters, max_adapters=MAX_ADAPTERS, max_lora_rank=RANK),
        plan=replace(config.plan, max_running=rows, speculate="off"),
        memory=replace(config.memory, kv_tokens=(rows + 1) * (-(-length // size) + 1) * size),
    )


def random_adapter(slots: AdapterSlots, targets: str, seed: int) -> Adapter:
    """In host memory, pinned for a GPU. In bfloat16 on a CPU, as most are saved."""
    dtype = torch.bfloat16 if slots.device.type == "cpu" else slots.dtype
    generator, linears = torch.Generator().manual_seed(seed), dict[int, LinearLora]()

    def part(inputs: int, outputs: int) -> LoraPart:
        a, b = (torch.randn(RANK, size, generator=generator).to(dtype) for size in (inputs, outputs))
        return LoraPart(a * 0.01, b * 0.01, 1.0)

    for index, linear in enumerate(slots.targets.linears):
        if linear is None or (targets == Q_AND_V and index % NUM_KINDS != QKV):
            continue
        is_left_out = [targets == Q_AND_V and number == 1 for number in range(len(linear.out_sizes))]
        sizes = zip(linear.out_sizes, is_left_out, strict=True)
        linears[index] = pack([None if is_out else part(linear.in_features, size) for size, is_out in sizes])
    data, joined = join(linears, is_pinned=slots.device.type == "cuda")
    adapter = Adapter(data, joined, RANK, f"{seed:02x}", "", Path())
    return adapter if data.is_pinned() else adapter.on(untouched_zeros(data.shape, data.dtype).copy_(data))


def fill(runner: TakesAdapters, slot: int, adapter: Adapter) -> None:
    is_ready = runner.fill_slot(slot, adapter)
    while not is_ready():
        time.sleep(COPY_POLL_S)


def _figures(bench: _Steps, case: Case, targets: str, rounds: int) -> Iterator[Figure]:
    kinds = (0, *case.adapters)
    seconds: dict[int, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        bench.seconds(case, kind, WARM_STEPS)
    for _ in range(rounds):
        for kind in kinds:
            seconds[kind].append(bench.seconds(case, kind, case.steps))
    name, bar = f"{case.name}, {targets}", dict(case.bars).get(targets)
    yield Figure(name, "base", 1e3 * statistics.median(seconds[0]), "ms", requests=rounds)
    for kind in case.adapters:
        ratios = [own / base for own, base in zip(seconds[kind], seconds[0], strict=True)]
        note = f"{min(ratios):.3f} to {max(ratios):.3f}" + ("" if bar is None else f"; bar {bar:g}")
        label = "1 adapter" if kind == 1 else f"{kind} adapters"
        yield Figure(name, label, 1e3 * statistics.median(seconds[kind]), "ms", requests=rounds)
        yield Figure(name, f"{label} / base", statistics.median(ratios), "", requests=rounds, note=note)


class _Steps:
    def __init__(self, runner: AnyRunner, shapes: ShapeChoice, vocab_size: int, block_size: int) -> None:
        self._runner, self._shapes = runner, shapes
        self._vocab_size, self._block_size = vocab_size, block_size
        self.targets = ALL
        self._step_no, self._changes = 0, 0

    def seconds(self, case: Case, num_adapters: int, steps: int) -> float:
        """Of one step, of rows whose adapters take turns."""
        flying, began = [], 0.0
        for number in range(-1, steps):
            plan = self._plan(case, number + 1 if case.count == 1 else 0, self._admitted(case, num_adapters, number))
            self._runner.forward(plan)
            flying.append(self._runner.draw(plan))
            if number == -1:  # Announces the rows.
                flying.pop().wait()
                began = time.perf_counter()
            elif len(flying) > 1:
                flying.pop(0).wait()
        for pending in flying:
            pending.wait()
        return (time.perf_counter() - began) / steps

    def _admitted(self, case: Case, num_adapters: int, number: int) -> tuple[Admission, ...]:
        if number >= 0:
            return ()
        length = case.context + case.count
        tokens = np.random.default_rng(0).integers(0, self._vocab_size, length).astype(np.int32)
        params = RowParams(SamplingParams(temperature=0.0))
        self._changes = (QKV_ALONE if self.targets == Q_AND_V else ALL_LINEARS) if num_adapters else 0
        return tuple(
            Admission(
                row,
                row,
                tokens,
                length,
                params,
                limit=length + case.steps + WARM_STEPS + 2,
                num_computed=case.context,
                adapter=1 + row % num_adapters if num_adapters else 0,
            )
            for row in range(case.rows)
        )

    def _plan(self, case: Case, later: int, admitted: tuple[Admission, ...]) -> StepPlan:
        rows, counts = np.arange(case.rows, dtype=np.int32), np.full(case.rows, case.count, np.int32)
        starts = np.full(case.rows, case.context + later, np.int32)
        num_singles = case.rows if case.count == 1 else 0
        sizes = StepSizes(starts, counts, case.count, num_singles=num_singles, adapters=self._changes)
        shape, is_captured = self._shapes.choose(sizes)
        draw, heads = self._shapes.heads(DueRows(case.rows), shape)
        blocks = -(-(case.context + case.count + case.steps + WARM_STEPS + 1) // self._block_size) if admitted else 0
        self._step_no += 1
        return StepPlan(
            self._step_no,
            rows,
            starts,
            counts,
            np.ones(case.rows, np.bool_),
            block_rows=np.repeat(rows, blocks),
            block_cols=np.tile(np.arange(blocks, dtype=np.int32), case.rows),
            block_ids=1 + np.arange(case.rows * blocks, dtype=np.int32),
            shape=shape,
            admitted=admitted,
            draw=draw,
            captures=(shape, *heads) if is_captured else heads,
        )
