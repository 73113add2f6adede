"""Requests with a shared prefix decode over the same blocks and draw the same tokens as without sharing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.grouped_plans import for_groups
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.config import RunConfig
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.cpp import native
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.device.device import open_device
from millrace.run.runner import Runner
from millrace.run.settings import KvFormat, RunnerSettings

BLOCK, SHARED, WIDTH, ROWS, STEPS = 16, 192, 15, 7, 6

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")


def make_runner(case: str, dtype: torch.dtype, kv_dtype: KvFormat) -> Runner:
    model = make_reference(case)
    device = open_device(RunConfig(device="cpu", threads=2))
    spec = spec_from_config(config_of(model))
    decoder = build_decoder(spec, StateDictSource.of(model), device=device.torch_device, dtype=dtype)
    sizes = {
        "num_blocks": 1 + spec.kv_groups.num_groups * ROWS * WIDTH,
        "block_size": BLOCK,
        "max_rows": ROWS,
        "max_context": WIDTH * BLOCK,
    }
    return Runner(decoder, device, RunnerSettings(kv_dtype=kv_dtype, **sizes))


def prompts() -> list[np.ndarray]:
    draw = np.random.default_rng(5)
    beginning = draw.integers(0, VOCAB, SHARED)
    return [np.concatenate((beginning, draw.integers(0, VOCAB, 3 + 5 * row))).astype(np.int32) for row in range(ROWS)]


def plan_of(rows: list[int], starts: list[int], counts: list[int], admitted: bool, shares_prefix: bool) -> StepPlan:
    """With `admitted`, rows are admitted with all their blocks; shared ones are those of row 0."""
    columns = [(row, column) for row in rows for column in range(WIDTH)] if admitted else []
    ids = [1 + column + (0 if shares_prefix and column < SHARED // BLOCK else row * WIDTH) for row, column in columns]
    params = RowParams(SamplingParams(temperature=0.8, seed=1))
    texts = prompts()
    return StepPlan(
        step_no=0,
        rows=np.asarray(rows, np.int32),
        starts=np.asarray(starts, np.int32),
        counts=np.asarray(counts, np.int32),
        samples=np.ones(len(rows), np.bool_),
        block_rows=np.asarray([row for row, _ in columns], np.int32),
        block_cols=np.asarray([column for _, column in columns], np.int32),
        block_ids=np.asarray(ids, np.int32),
        shape=exact_shape(np.asarray(counts, np.int32)),
        admitted=tuple(Admission(row, row, texts[row], len(texts[row]), params) for row in rows) if admitted else (),
    )


def drawn_together(runner: Runner, shares_prefix: bool) -> list[list[int]]:
    """Row 0 computes the prefix, the others are admitted after it; then all decode together."""
    num_groups = runner.decoder.spec.kv_groups.num_groups

    def drawn_by(plan: StepPlan) -> list[int]:
        return runner.launch(for_groups(plan, num_groups, ROWS * WIDTH)).wait().tokens.tolist()

    lengths = [len(text) for text in prompts()]
    first = drawn_by(plan_of([0], [0], [lengths[0]], True, shares_prefix))
    others = list(range(1, ROWS))
    starts = [SHARED if shares_prefix else 0] * len(others)
    counts = [lengths[row] - start for row, start in zip(others, starts, strict=True)]
    drawn = [first + drawn_by(plan_of(others, starts, counts, True, shares_prefix))]
    for step in range(STEPS):
        plan = plan_of(list(range(ROWS)), [length + step for length in lengths], [1] * ROWS, False, shares_prefix)
        drawn.append(drawn_by(plan))
    return drawn


@pytest.mark.parametrize("kv_dtype", ["full", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama_tied", "gemma3"])
def test_rows_draw_the_same_with_shared_blocks_as_with_their_own(
    case: str, dtype: torch.dtype, kv_dtype: KvFormat
) -> None:
    whole, apart = make_runner(case, dtype, kv_dtype), make_runner(case, dtype, kv_dtype)
    assert whole.native_step is not None
    # Without the native step, which cannot be switched off.
    apart.native_step = None
    expected = drawn_together(make_runner(case, dtype, kv_dtype), shares_prefix=False)
    assert drawn_together(whole, shares_prefix=True) == expected
    assert drawn_together(apart, shares_prefix=True) == expected
