"""A dry run of few layers finds every kernel that the steps of a first request launch."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from helpers.tiny_models import StateDictSource, config_of, make_reference

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.plan.step import StepShape
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device.device import open_device
from millrace.run.settings import RunnerSettings
from millrace.run.shapes.order import capture_order

pytestmark = pytest.mark.gpu


def forget_kernels() -> None:
    """Clear Triton's caches, as in a new process."""
    from triton.runtime.jit import JITFunction

    import millrace.ops.triton as kernels_package

    for info in pkgutil.walk_packages(kernels_package.__path__, f"{kernels_package.__name__}."):
        if info.name.endswith("build_server"):
            continue
        for found in vars(importlib.import_module(info.name)).values():
            if isinstance(found, JITFunction):
                found.device_caches.clear()


@torch.inference_mode()
def kernels_of(runner: CudaRunner, decoder: Decoder) -> set[str]:
    from millrace.ops.triton.compile.dry_run import dry_run

    kernels: set[str] = set()
    with dry_run(kernels.add):
        for part in capture_order(runner.writer.shapes):
            if isinstance(part, StepShape):
                # The parts of a step are run one by one, without steps.
                runner.work.send(None, part)
                runner.work.body(part, decoder)
    return kernels


def runner_for(case: str, build_pool: Any = None) -> CudaRunner:
    model = make_reference(case)
    device = open_device(RunConfig(device="cuda"))
    decoder = build_decoder(
        spec_from_config(config_of(model)), StateDictSource.of(model), device=device.torch_device, dtype=torch.bfloat16
    )
    sizes = {"num_blocks": 200, "block_size": 16, "max_rows": 40, "max_context": 128, "token_budget": 256}
    return CudaRunner(decoder, device, RunnerSettings(graphs=True, **sizes), build_pool=build_pool)


@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "qwen2_window", "gemma2", "smollm3", "qwen3_moe", "qwen3_moe_sparse"]
)
def test_few_layers_launch_the_kernels_of_all(case: str) -> None:
    runner = runner_for(case)
    forget_kernels()
    everything = kernels_of(runner, runner.decoder)
    assert len(everything) > 5
    assert kernels_of(runner, runner.decoder.with_distinct_layers()) == everything


class FakeBuildPool:
    """A build pool whose first requests stay open until the caller waits for them."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.can_wait: list[bool] = []

    def request(self, kernel: str, target: tuple[str, int, int], *, can_wait: bool = False) -> None:
        self.kernels.append(kernel)
        self.can_wait.append(can_wait)

    def is_done(self, wait_s: float = 0.0, *, urgent_only: bool = False) -> bool:
        return wait_s > 0


def test_all_kernel_builds_are_requested_before_the_engine_is_ready() -> None:
    """They are requested while the first kernels are compiled, so this adds no wait."""
    forget_kernels()
    build_pool = FakeBuildPool()
    runner = runner_for("qwen3", build_pool)
    assert set(build_pool.can_wait) == {False, True}
    assert build_pool.can_wait == sorted(build_pool.can_wait), "what cannot wait comes first"
    assert kernels_of(runner, runner.decoder) <= set(build_pool.kernels)
