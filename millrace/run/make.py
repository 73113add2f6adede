"""Chooses the runner: CudaRunner on a GPU with paged attention, else Runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.models.decoder import Decoder
from millrace.ops.attention import PagedAttention
from millrace.run.device.device import Device
from millrace.run.drafting.drafter import DraftGuide
from millrace.run.drafting.models import DrafterModel
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.protocol import TellDrafts
from millrace.run.runner import Runner
from millrace.run.settings import RunnerSettings

if TYPE_CHECKING:
    from millrace.run.cuda_runner import CudaRunner


def make_runner(
    decoder: Decoder,
    device: Device,
    settings: RunnerSettings,
    drafter: DrafterModel | None = None,
    build_pool: KernelBuildPool | None = None,
    guide: DraftGuide | None = None,
    tell_drafts: TellDrafts | None = None,
) -> Runner | CudaRunner:
    """`guide`: the grammars, on rank 0. Where the device proposes, masks alone refuse drafts. `tell_drafts`: see
    `Runner`."""
    if device.kind != "cuda" or not isinstance(decoder.attention, PagedAttention):
        return Runner(decoder, device, settings, drafter, guide, tell_drafts)
    from millrace.run.cuda_runner import CudaRunner  # needs Triton

    return CudaRunner(decoder, device, settings, drafter, build_pool)
