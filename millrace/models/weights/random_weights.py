"""Random weights with the shapes of a config, for benchmarks in which only sizes matter.

A tensor's values depend only on the seed and its name, so the order of reading does not matter. On the CPU random bits
are written into the sign and mantissa, which is about ten times as fast as drawing normal numbers: all magnitudes are
within a factor of two, around the config's `initializer_range`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.errors import ModelError
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import all_tensors, layout_of

_MANTISSA_BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_EXPONENT_BIAS = {torch.float32: 127, torch.float16: 15, torch.bfloat16: 127}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_OCTAVE_RMS = math.sqrt(7 / 3)
"""Root mean square of numbers uniform in [1, 2)."""
CHUNK_ITEMS = 1 << 22
SMALL = 1 << 16
"""A tensor of no more numbers has the same ones on every device, rounded to the dtype."""
RESIDUAL_KEY = "residual_initializer_range"
"""Key of a config: range of the weights whose products are added to the residual stream; as the others by default."""
_RESIDUAL_NAMES = ("o_proj.weight", "down_proj.weight")
_GATE_NORMS = ("linear_attn.norm.weight", "mamba.norm.weight")
"""Norms to which a family's offset is not added."""


class RandomWeights:
    def __init__(self, path: Path, config: dict[str, Any], seed: int) -> None:
        self._path, self._seed = path, seed
        spec = spec_from_config(config)
        self._shapes = {part.name: part.shape for part in all_tensors(layout_of(spec))}
        self._std = float(config.get("initializer_range") or 0.02)
        self._residual_std = float(config.get(RESIDUAL_KEY) or self._std)
        self._dtype = _DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")), torch.float32)
        self._norm_value = 1.0 - spec.norm_offset

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._shapes.get(name)
        if found is None:
            raise ModelError(f"{self._path} describes no tensor {name}.")
        return found

    def file_of(self, name: str) -> Path:
        return self._path

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape, dtype = self.shape(name), dtype or self._dtype
        out = torch.empty(shape, device=device, dtype=dtype)
        if name.endswith("norm.weight"):
            return out.fill_(1.0 if name.endswith(_GATE_NORMS) else self._norm_value)
        std = self._residual_std if name.endswith(_RESIDUAL_NAMES) else self._std
        seed = int.from_bytes(hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest(), "little")
        if out.numel() <= SMALL:
            plain = torch.empty(shape)
            _fill_with_bits(plain, std, seed)
            return out.copy_(plain)
        if out.device.type == "cpu" and dtype in _MANTISSA_BITS:
            _fill_with_bits(out, std, seed)
            return out
        generator = torch.Generator(out.device).manual_seed(seed & (2**63 - 1))
        return out.normal_(0.0, std, generator=generator)


def _fill_with_bits(out: torch.Tensor, std: float, seed: int) -> None:
    """Random sign and mantissa, fixed exponent: |value| is uniform in [2^k, 2^(k+1)) with an RMS near `std`."""
    mantissa, bias = _MANTISSA_BITS[out.dtype], _EXPONENT_BIAS[out.dtype]
    bits = 8 * out.element_size()
    unsigned = np.dtype(f"<u{out.element_size()}")
    exponent = max(1, round(math.log2(std / _OCTAVE_RMS)) + bias)
    keep = unsigned.type((1 << (bits - 1)) | ((1 << mantissa) - 1))
    put = unsigned.type(exponent << mantissa)
    target = out.view(-1).view(torch.int32 if bits == 32 else torch.int16).numpy().view(unsigned)
    draw = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, target.size, CHUNK_ITEMS):
        chunk = target[start : start + CHUNK_ITEMS]
        words = draw.integers(0, 2**64, size=-(-chunk.nbytes // 8), dtype=np.uint64)
        np.bitwise_and(words.view(unsigned)[: chunk.size], keep, out=chunk)
        np.bitwise_or(chunk, put, out=chunk)
