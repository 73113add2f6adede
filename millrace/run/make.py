"""Chooses the runner: CudaRunner on a GPU with paged attention, else Runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.config import Speculation
from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.run.device.device import Device
from millrace.run.device.kv_pool import KvFormat
from millrace.run.drafting.models import DrafterModel
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.runner import Runner

if TYPE_CHECKING:
    from millrace.run.cuda_runner import CudaRunner


def make_runner(
    decoder: Decoder,
    device: Device,
    *,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    max_context: int,
    token_budget: int,
    graphs: bool = True,
    kv_dtype: KvFormat = "full",
    build_pool: KernelBuildPool | None = None,
    speculate: Speculation = "off",
    drafter: DrafterModel | None = None,
    host_slots: int = 0,
    max_copied: int = 1,
) -> Runner | CudaRunner:
    if device.kind != "cuda" or not isinstance(decoder.attention, PagedAttention):
        return Runner(
            decoder,
            device,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_context=max_context,
            kv_dtype=kv_dtype,
            speculate=speculate,
            drafter=drafter,
            host_slots=host_slots,
        )
    from millrace.run.cuda_runner import CudaRunner  # needs Triton

    return CudaRunner(
        decoder,
        device,
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=max_rows,
        max_context=max_context,
        token_budget=token_budget,
        graphs=graphs,
        kv_dtype=kv_dtype,
        build_pool=build_pool,
        speculate=speculate,
        drafter=drafter,
        host_slots=host_slots,
        max_copied=max_copied,
    )
