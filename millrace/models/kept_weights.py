"""Which of a model's matrices stay as their files store them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from millrace.config import Quantization, cache_dir
from millrace.models.grouped import GroupedMatrices, GroupedSource
from millrace.models.spec.layout import (
    ModelLayout,
)
from millrace.models.stored import KeptMatrices, QuantisedSource, StoredMatrices
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.ops.linear.stored import stored_order
from millrace.ops.registry import choose
from millrace.ops.triton import triton_missing

if TYPE_CHECKING:
    from millrace.models.weights import WeightSource


def stored_matrices(
    source: WeightSource,
    layout: ModelLayout,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization,
    mesh: Mesh = ONE_RANK,
) -> StoredMatrices | None:
    """The matrices that stay in the quantised format of their file; None if all are dequantised."""
    if quantization == "fp8" or not isinstance(source, QuantisedSource):
        return None
    keeps_size = isinstance(source, GroupedSource)
    order = stored_order(choose("stored_linear", device, dtype, int8=quantization == "int8", keeps_size=keeps_size))
    part = f"{mesh.rank} of {mesh.size}" if mesh.size > 1 else ""
    return None if order is None else StoredMatrices(source, layout, dtype, cache_dir() / "packed", order, part)


def grouped_matrices(
    source: WeightSource,
    layout: ModelLayout,
    device: torch.device,
    dtype: torch.dtype,
    stored: KeptMatrices | None,
    quantization: Quantization = "none",
) -> GroupedMatrices | None:
    """The other matrices that stay as a quantised checkpoint stores them; None if the source is none."""
    if isinstance(source, GroupedSource):
        return GroupedMatrices(source, layout, device, dtype, stored)
    reads_blocks = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not triton_missing(device)
    if not reads_blocks or quantization != "none" or not isinstance(source, QuantisedSource):
        return None
    from millrace.models.formats.gguf import GgufMatrices  # local: imports the reader of GGUF

    return GroupedMatrices(GgufMatrices(source, layout), layout, device, dtype, stored)
