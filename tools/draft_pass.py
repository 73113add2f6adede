"""Times one pass of a drafter on this CPU, and one plain step of its model: python tools/draft_pass.py MODEL DRAFTER.

Prints the fastest of many passes by rows, beside the time that reading the drafter's weights takes at the machine's
bandwidth: a pass cannot be faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from millrace.config import RunConfig
from millrace.models.drafters.load import drafter_bytes, load_drafter, open_drafter
from millrace.models.drafters.program import EagleDrafter
from millrace.models.load import load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.cpu.draft_pass import NativeEaglePass
from millrace.run.cpu.native_step import NativeStep
from millrace.run.device.device import open_device
from millrace.run.device.processor_limits import processor_limits
from millrace.run.drafting.chain import DraftInputs, DraftPass
from millrace.run.drafting.models import allocate_pools
from millrace.run.drafting.passes import DraftTable, EaglePass
from millrace.run.sampling.sampler import Sampler
from millrace.run.settings import RunnerSettings
from millrace.run.table.request_table import RequestTable
from millrace.sources.resolve import resolve_model

BLOCK, CONTEXT, TIMES = 16, 304, 200


def fastest(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds: wall time of the fastest call, and CPU time of the mean one."""
    best, began = float("inf"), time.process_time()
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best, 1e3 * (time.process_time() - began) / TIMES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    device, files = open_device(RunConfig(device="cpu")), resolve_model(args.model)
    decoder = load_decoder(files, device=device.torch_device, dtype=torch.float32, quantization="int8")
    found = open_drafter(args.drafter, spec_from_config(files.config))
    bandwidth = processor_limits(torch.float32).bytes_per_s
    for quantization in ("none", "int8"):
        drafter = load_drafter(found, decoder, quantization=quantization)
        assert isinstance(drafter, EagleDrafter)
        num_bytes = drafter_bytes(found, torch.float32, quantization)
        print(f"{quantization}: {num_bytes / 1e6:.1f} MB, {1e3 * num_bytes / bandwidth:.2f} ms at the bandwidth")
        for rows in args.rows:
            for name, run in passes(drafter, decoder, device, rows).items():
                inputs = one_token(decoder, rows)

                def both(run: DraftPass = run, inputs: DraftInputs = inputs) -> None:
                    states = run.forward(inputs)
                    run.draw(states, inputs.rows, inputs.starts + np.int32(1))

                wall, cpu = fastest(both)
                print(f"  {rows} rows, {name}: {wall:.2f} ms, {cpu:.2f} ms CPU")


def passes(drafter: EagleDrafter, decoder, device, rows: int) -> dict[str, DraftPass]:  # type: ignore[no-untyped-def]
    """The pass op by op, and in C++ if there is one, over rows that have `CONTEXT` tokens."""
    per_row = CONTEXT // BLOCK + 1
    table = RequestTable(device, max_rows=rows, max_blocks=per_row)
    sampler = Sampler(device, table, max_rows=rows, vocab_size=decoder.spec.vocab_size)
    every = np.arange(rows, dtype=np.int32)
    params = RowParams(SamplingParams(temperature=0.0), ())
    admitted = tuple(
        Admission(row, row, np.zeros(CONTEXT, np.int32), CONTEXT, params, limit=CONTEXT + 9) for row in range(rows)
    )
    blocks = np.arange(rows * per_row, dtype=np.int32) + np.int32(1)
    places = np.repeat(every, per_row), np.tile(np.arange(per_row, dtype=np.int32), rows), blocks
    counts = np.ones(rows, np.int32)
    plan = StepPlan(0, every, counts, counts, np.ones(rows, np.bool_), *places, exact_shape(counts), admitted=admitted)
    table.update(plan)
    sampler.update(plan)
    settings = RunnerSettings(
        num_blocks=rows * per_row + 1, block_size=BLOCK, max_rows=rows, max_context=CONTEXT + 9, kv_dtype="float16"
    )
    _, kv = allocate_pools(decoder, device.torch_device, settings, drafter)
    made: dict[str, DraftPass] = {
        "op by op": EaglePass(drafter, kv, DraftTable(table, device, BLOCK), sampler, torch.float32)
    }
    if drafter.native_stack is not None:
        step = NativeStep(drafter.native_stack, kv, table, sampler, max_rows=rows)
        made["native"] = NativeEaglePass(drafter, step, torch.float32)
    return made


def one_token(decoder, rows: int) -> DraftInputs:  # type: ignore[no-untyped-def]
    states = torch.randn(rows, decoder.spec.hidden_size)
    tokens = np.arange(rows, dtype=np.int32) + np.int32(100)
    starts = np.full(rows, CONTEXT - 1, np.int32)
    return DraftInputs(np.arange(rows, dtype=np.int32), starts, np.ones(rows, np.int32), tokens, states)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
