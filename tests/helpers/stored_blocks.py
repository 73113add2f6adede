"""Random quantised GGUF blocks, and a weight source for a whole model made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as T

from millrace.models.spec.layout import all_tensors, layout_of
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.linear.gguf_values import dequantise

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    **dict.fromkeys(("IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    "IQ1_M": (),
    "MXFP4": (),
    "NVFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Offsets of the float16 numbers in a block of each format."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> npt.NDArray[np.uint8]:
    """[rows, bytes]: random bits, with scales of both signs around `scale`."""
    draw = np.random.default_rng(seed)
    items, size = gguf.GGML_QUANT_SIZES[T[kind]]
    blocks = draw.integers(0, 256, (rows * columns // items, size), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = (draw.standard_normal(len(blocks)) * scale).astype(np.float16)
        halves[draw.random(len(blocks)) < 0.02] = 0.0
        blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":  # the scale is in the upper quarters of four words: 2^-7 with the sign of the first
        words = blocks[:, 48:56].view(np.uint16)
        words[:] = (words & 0x0FFF) | np.array([0, 0, 0x0000, 0x2000], dtype=np.uint16)
        blocks[:, 48:56] = words.view(np.uint8)
    if kind == "MXFP4":  # an exponent of two, plus 127
        blocks[:, 0] = draw.integers(115, 123, len(blocks))
    return blocks.reshape(rows, -1)


def dequantised(kind: str, blocks: npt.NDArray[np.uint8], columns: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((len(blocks), columns), dtype=dtype)
    dequantise(blocks, T[kind], out)
    return out


class StoredSource:
    """Every tensor of a spec: matrices in the formats given by name suffix, others plain."""

    def __init__(self, spec: ModelSpec, formats: Mapping[str, str], file: Path) -> None:
        self.shapes = {part.name: part.shape for part in all_tensors(layout_of(spec))}
        self._formats, self._file = formats, file
        self.rows_read: list[str] = []

    def names(self) -> Iterable[str]:
        return self.shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def file_of(self, name: str) -> Path:
        return self._file

    def get(self, name: str, *, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape, kind = self.shapes[name], self.stored_format(name)
        dtype = dtype or torch.float32
        if kind is not None:
            return dequantised(kind, self._blocks(name, kind), shape[1], dtype).to(device=device)
        torch.manual_seed(len(name))
        plain = torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.05
        return plain.to(device=device, dtype=dtype)

    def stored_format(self, name: str) -> str | None:
        return next((kind for end, kind in self._formats.items() if name.endswith(end)), None)

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]:
        kind = self.stored_format(name)
        assert kind is not None
        self.rows_read.append(name)
        return self._blocks(name, kind)

    def _blocks(self, name: str, kind: str) -> npt.NDArray[np.uint8]:
        rows, columns = self.shapes[name]
        # K-quants multiply two scales
        scale = 0.0005 if kind.endswith("_K") else 0.005
        return random_blocks(kind, rows, columns, seed=sum(name.encode()), scale=scale)
