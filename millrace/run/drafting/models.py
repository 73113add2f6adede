"""Drafters that are models: what each kind needs of the pool and of the target."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.config import Speculation
from millrace.models.decoder import Decoder
from millrace.models.drafters.program import EagleDrafter, MedusaDrafter
from millrace.models.spec.model_spec import ModelSpec
from millrace.run.device.kv_pool import allocate_kv, format_or_full
from millrace.run.settings import KvFormat, RunnerSettings

DrafterModel = Decoder | EagleDrafter | MedusaDrafter
"""A draft model, a feature drafter, or Medusa heads."""


def kind_of(model: DrafterModel) -> Speculation:
    """As `--speculate` names it."""
    if isinstance(model, Decoder):
        return "draft"
    return "medusa" if isinstance(model, MedusaDrafter) else "eagle"


def kv_spec_of(model: DrafterModel) -> ModelSpec | None:
    """The layers whose keys and values are kept; None for Medusa heads."""
    return model.spec if isinstance(model, Decoder) else model.spec.decoder


def allocate_pools(
    decoder: Decoder, device: torch.device, settings: RunnerSettings, drafter: DrafterModel | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The KV pool, and the drafter's part of every block, which is empty if it has none."""

    def allocate(spec: ModelSpec, kv_dtype: KvFormat) -> list[Tensor]:
        return allocate_kv(
            spec,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            dtype=decoder.dtype,
            device=device,
            kv_dtype=kv_dtype,
        )

    kv, spec = allocate(decoder.spec, settings.kv_dtype), None if drafter is None else kv_spec_of(drafter)
    if spec is None:
        return kv, []
    return kv, allocate(spec, format_or_full(settings.kv_dtype, spec, dtype=decoder.dtype, device=device))


def read_layers(model: DrafterModel | None) -> npt.NDArray[np.int64] | None:
    """After how many layers of the target the drafter reads its states, at every token; empty: after the final norm.
    None for drafters that read no states, or only those that tokens are drawn from."""
    return np.array(model.spec.target_layers, np.int64) if isinstance(model, EagleDrafter) else None
