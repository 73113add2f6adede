"""A whole model over a four-bit KV cache on a GPU: its tokens, refusals, and the memory planned.

Without a GPU the runner's kernels are interpreted.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.paged import PagedDriver
from helpers.quick_interpreter import quick_interpreter
from helpers.small_decoder import decoder_for
from helpers.tiny_models import VOCAB
from helpers.triton_mode import device as place
from helpers.triton_mode import interpreted

from millrace.config import RunConfig, load_config
from millrace.engine.memory_plan import GIB, make_memory_plan
from millrace.errors import ConfigError
from millrace.models.decoder import Decoder
from millrace.ops.kv.cache import SCALE_INT32
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.defaults import CUDA_DEFAULTS
from millrace.run.device.device import CpuDevice, open_device
from millrace.run.device.kv_pool import resolve_kv_dtype
from millrace.run.graphs.device_state import make_device_state
from millrace.run.settings import KvFormat, RunnerSettings

GPU = torch.device("cuda")
SMALL = {"head_dim": 32, "num_hidden_layers": 2}


class Int4Driver(PagedDriver):
    """Through the reference. Unwritten bytes are 255: 15 as a number, NaN as a scale."""

    def __init__(self, decoder: Decoder, block_size: int = 4) -> None:
        super().__init__(decoder, block_size)
        self.kv = [
            torch.full((*kv.shape[:4], kv.shape[4] // 8 + SCALE_INT32), -1, dtype=torch.int32, device=kv.device)
            for kv in self.kv
        ]


def greedy(decoder: Decoder, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Tokens over the reference's cache, and by how much the least certain of them led."""
    driver, tokens, least, given = Int4Driver(decoder), [], float("inf"), prompt
    for _ in range(count):
        best = driver.step([(0, given)])[0][-1].topk(2)
        given = [int(best.indices[0])]
        tokens, least = tokens + given, min(least, float(best.values[0] - best.values[1]))
    return tokens, least


def test_the_runner_draws_what_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests with the same prompt; the second one finds it in the cache."""
    if interpreted:
        want_few_programs(monkeypatch)
    prompt = np.random.default_rng(6).integers(0, VOCAB, 9).astype(np.int32)
    expected, lead = greedy(decoder_for(place, paged=False, **SMALL), prompt.tolist(), 2)
    assert lead > 1e-3
    decoder = decoder_for(place, paged=True, **SMALL)
    device = open_device(RunConfig(device="cuda")) if place.type == "cuda" else CpuDevice(1)
    sizes = {"num_blocks": 40, "block_size": 4, "max_rows": 3, "max_context": 32}
    settings = RunnerSettings(token_budget=24, kv_dtype="int4", **sizes)
    assert {kv.dtype for kv in make_device_state(decoder, device, settings, None).kv} == {torch.int32}
    runner = CudaRunner(decoder, device, settings)
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=40, block_size=4, max_running=3, token_budget=24, mixed_budget=24),
        shapes=ShapeChoice(runner.shapes),
    )
    drawn, starts = [], []
    for index in range(2):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        scheduler.submit(Request(index, prompt, 2, row_params=RowParams(params, ())))
        tokens: list[int] = []
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            assert plan is not None
            starts.append(int(plan.starts[0]))
            with quick_interpreter() if interpreted else nullcontext():
                result = runner.launch(plan).wait()
            tokens += scheduler.apply(plan.step_no, result.drawn()).tokens.tolist()
        drawn.append(tokens)
    assert starts == [0, 9, 8, 9]
    assert drawn == [expected, expected]


def test_what_a_gpu_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = decoder_for(torch.device("cpu"), paged=False).spec

    def resolve(head_dim: int, missing: str = "") -> KvFormat:
        monkeypatch.setattr("millrace.run.device.kv_pool.triton_missing", lambda device: missing)
        own = dataclasses.replace(spec, head_dim=head_dim)
        return resolve_kv_dtype("int4", own, dtype=torch.bfloat16, device=GPU)

    assert [resolve(head_dim) for head_dim in (32, 80, 128)] == ["int4"] * 3
    with pytest.raises(ConfigError, match="needs heads in multiples of 16 items, but the model's have 72"):
        resolve(72)
    with pytest.raises(ConfigError, match="at least 32 items on a GPU, but the model's have 16. Set --kv-dtype auto"):
        resolve(16)
    with pytest.raises(ConfigError, match="needs the package triton. Install it, or set --kv-dtype auto"):
        resolve(64, "needs the package triton")


def test_the_plan_is_what_is_allocated() -> None:
    decoder = decoder_for(torch.device("cpu"), paged=True, head_dim=32)
    config = load_config(None, {"memory.kv_tokens": 320, "plan.block_size": 16}).config
    sizes = {"weights_bytes": GIB, "free_bytes": 20 * GIB}
    plan = make_memory_plan(config, decoder.spec, CUDA_DEFAULTS, dtype=torch.bfloat16, kv_dtype="int4", **sizes)
    settings = RunnerSettings(
        num_blocks=plan.num_blocks, block_size=16, max_rows=3, token_budget=24, max_context=32, kv_dtype="int4"
    )
    kv = make_device_state(decoder, CpuDevice(1), settings, None).kv
    scratch = sum(layer[:, :1].nbytes for layer in kv)
    assert sum(layer.nbytes for layer in kv) - scratch == plan.kv_bytes
    assert [name for name in plan.parts() if name.endswith(" tokens, int4")]
