"""What is compiled before a first request is all that its steps launch, although few layers were rehearsed."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from helpers.tiny_models import StateDictSource, config_of, make_reference

from millrace.config import RunConfig
from millrace.models.decoder import Decoder
from millrace.models.families import spec_from_config
from millrace.models.load import build_decoder
from millrace.run.cuda_runner import CudaRunner
from millrace.run.device import open_device

pytestmark = pytest.mark.gpu


def forget_kernels() -> None:
    """As in a process that has launched nothing."""
    from triton.runtime.jit import JITFunction

    import millrace.ops.triton as room

    for info in pkgutil.iter_modules(room.__path__):
        if info.name == "build_server":
            continue
        for found in vars(importlib.import_module(f"{room.__name__}.{info.name}")).values():
            if isinstance(found, JITFunction):
                found.device_caches.clear()


@torch.inference_mode()
def met(runner: CudaRunner, decoder: Decoder) -> set[str]:
    from millrace.ops.triton.prebuild import rehearsal

    kernels: set[str] = set()
    with rehearsal(kernels.add):
        for bucket in runner._warm_list():
            runner._send(None, bucket)
            runner._body(bucket, decoder)
    return kernels


@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "qwen2_window", "gemma2", "smollm3", "qwen3_moe", "qwen3_moe_sparse"]
)
def test_few_layers_launch_what_all_do(case: str) -> None:
    model = make_reference(case)
    device = open_device(RunConfig(device="cuda"))
    decoder = build_decoder(
        spec_from_config(config_of(model)), StateDictSource.of(model), device=device.torch_device, dtype=torch.bfloat16
    )
    runner = CudaRunner(
        decoder, device, num_blocks=200, block_size=16, max_rows=40, max_context=128, token_budget=256, graphs=True
    )
    forget_kernels()
    everything = met(runner, decoder)
    assert len(everything) > 5
    assert met(runner, decoder.thin()) == everything
