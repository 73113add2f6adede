"""The GPU runner over ranks, its kernels interpreted: every rank draws the tokens of one.

Ranks are threads that take turns, since the interpreter serves one at a time: a rank computes until it waits for a sum.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch
from helpers.decode_table import want_few_programs
from helpers.quick_interpreter import quick_interpreter
from helpers.rank_threads import meshes_of
from helpers.small_decoder import with_paged_attention
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from helpers.triton_mode import interpreted
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import CpuDevice
from millrace.run.ranks.shared_mesh import SharedMesh
from millrace.run.settings import RunnerSettings

T = TypeVar("T")
BLOCKS, BLOCK, ROWS, BUDGET = 60, 4, 4, 40


class TurnMesh(Mesh):
    def __init__(self, shared: SharedMesh, turn: threading.Lock) -> None:
        self.rank, self.size, self._shared, self._turn = shared.rank, shared.size, shared, turn

    def _elsewhere(self, work: Callable[[], Tensor]) -> Tensor:
        self._turn.release()
        try:
            return work()
        finally:
            self._turn.acquire()

    def sum(self, x: Tensor) -> Tensor:
        return self._elsewhere(lambda: self._shared.sum(x))

    def gather(self, x: Tensor, widths: object) -> Tensor:
        return self._elsewhere(lambda: self._shared.gather(x, widths))  # type: ignore[arg-type]


class TurnDevice(CpuDevice):
    def __init__(self, turn: threading.Lock) -> None:
        super().__init__(1)
        self._turn = turn

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        def run() -> T:
            with self._turn:
                return work()

        return super()._submit(run)


def decoder_for(case: str, mesh: Mesh) -> Decoder:
    model = make_reference(case, num_hidden_layers=2)
    spec, source = spec_from_config(config_of(model)), StateDictSource.of(model)
    decoder = build_decoder(spec, source, device=torch.device("cpu"), dtype=torch.float32, mesh=mesh)
    return with_paged_attention(decoder)


def tokens_of(runner: CudaRunner) -> dict[int, list[int]]:
    """Two requests, greedy and sampled, with two steps in flight."""
    draw = random.Random(2)
    limits = {"token_budget": BUDGET, "mixed_budget": 24, "max_running": ROWS}
    settings = SchedulerSettings(num_blocks=BLOCKS, block_size=BLOCK, **limits)
    scheduler = Scheduler(settings, shapes=ShapeChoice(runner.shapes))
    for index, length in enumerate((9, 3)):
        params = SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=3, ignore_eos=True)
        prompt = np.array(draw.choices(range(VOCAB), k=length), np.int32)
        scheduler.submit(
            Request(id=index, prompt=prompt, max_tokens=3, end_token_ids=(5,), row_params=RowParams(params, (5,)))
        )
    tokens: dict[int, list[int]] = {0: [], 1: []}
    flying = []
    while scheduler.has_work or flying:
        if (plan := scheduler.plan(0.0)) is not None:
            flying.append((plan, runner.launch(plan)))
        if len(flying) > 1 or plan is None:
            done, pending = flying.pop(0)
            outcome = scheduler.apply(done.step_no, pending.wait().drawn())
            for request_id, token in zip(outcome.request_ids.tolist(), outcome.tokens.tolist(), strict=True):
                tokens[request_id].append(token)
    return tokens


@pytest.mark.skipif(not interpreted, reason="on a GPU tests/engine/test_ranks_gpu.py runs ranks as processes")
@pytest.mark.parametrize("case", ["qwen3_moe_sparse"])
def test_every_rank_draws_the_tokens_of_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want_few_programs(monkeypatch)
    sizes = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_rows": ROWS, "max_context": 128, "token_budget": BUDGET}
    turn = threading.Lock()
    with quick_interpreter(), meshes_of(2) as meshes:
        expected = tokens_of(CudaRunner(decoder_for(case, ONE_RANK), CpuDevice(1), RunnerSettings(**sizes)))
        own = [TurnMesh(mesh, turn) for mesh in meshes]
        runners = [CudaRunner(decoder_for(case, mesh), TurnDevice(turn), RunnerSettings(**sizes)) for mesh in own]
        assert runners[0].facts.shapes.digest == runners[1].facts.shapes.digest
        with ThreadPoolExecutor(2) as pool:
            for found in [pool.submit(tokens_of, runner) for runner in runners]:
                assert found.result(300) == expected
