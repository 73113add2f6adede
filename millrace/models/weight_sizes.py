"""Bytes of weights, from a model's spec alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from millrace.config import Quantization
from millrace.models.spec.layout import (
    Matrix,
    ModelLayout,
    MoeLayout,
    all_tensors,
    layout_of,
    norms_of,
)
from millrace.models.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    pass


def spec_weight_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: Quantization = "none") -> int:
    """Bytes of all weights: matrices and biases in the model's dtype, quantised matrices in 8 bits with a scale per
    output, norms and rotary frequencies in float32."""
    return layout_bytes(spec, layout_of(spec), dtype, quantization)


def layout_bytes(spec: ModelSpec, layout: ModelLayout, dtype: torch.dtype, quantization: Quantization = "none") -> int:
    """The same of these tensors."""
    norms = sum(norm.num_items for layer in layout.layers for norm in norms_of(layer))
    norms += sum(part.num_items for part in layout.final_norm)
    frequencies = sum(rope.rotary_dim // 2 for rope in spec.ropes)
    items = sum(part.num_items for part in all_tensors(layout)) - norms
    total = items * dtype.itemsize + 4 * (norms + frequencies)
    if quantization == "fp8":
        for matrix in quantised_matrices(layout):
            rows, columns = matrix.shape
            total += rows * columns * (1 - dtype.itemsize) + 4 * rows
    return total


def quantised_matrices(layout: ModelLayout) -> Iterator[Matrix]:
    """The matrices that `--quantization` applies to: those of the layers, except routers and experts."""
    for layer in layout.layers:
        yield from layer.mixer.matrices()
        mlp = layer.mlp
        yield from (mlp.shared or ()) if isinstance(mlp, MoeLayout) else (mlp or ())
