"""Makes the drafter of a GPU engine from its model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace.models.decoder import Decoder
from millrace.models.drafters.program import EagleDrafter
from millrace.run.drafting.device_chain import ChainSetup, DeviceChain, DeviceDrafter
from millrace.run.drafting.device_features import DeviceFeatures, DeviceMedusa
from millrace.run.drafting.models import DrafterModel


def make_device_drafter(
    setup: ChainSetup, model: DrafterModel, kv: Sequence[Tensor], dtype: torch.dtype
) -> DeviceDrafter:
    """`kv`: the drafter's part of every block. `dtype`: of the target's states."""
    if isinstance(model, Decoder):
        return DeviceChain(setup, model, kv)
    if isinstance(model, EagleDrafter):
        return DeviceFeatures(setup, model, kv, dtype)
    return DeviceMedusa(setup, model, dtype)
