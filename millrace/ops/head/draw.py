"""Drawing tokens from logits by the C++ kernel (cpp/draw.cpp): each row in a pass or two, without temporaries.

The meaning is that of the torch code in run/sampling/sampler.py, which is what runs where there is no compiler.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.ops.native import native, native_missing

__all__ = ["NativeDraw", "native_missing"]

Floats = npt.NDArray[np.float32]


class NativeDraw:
    def __init__(self) -> None:
        self._draw = native().slow.draw

    def __call__(
        self,
        logits: Tensor,
        temperature: Floats,
        top_k: npt.NDArray[np.int64],
        top_p: Floats,
        min_p: Floats,
        uniforms: npt.NDArray[np.float64],
    ) -> Tensor:
        """int64 [n] of float32 logits [n, vocab]. A temperature of 0 takes the likeliest, the first of
        equals; a top_k of 0 keeps all; `uniforms` in [0, 1) say where in the cumulative distribution to draw."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        columns = [np.ascontiguousarray(part) for part in (temperature, top_k, top_p, min_p, uniforms)]
        tokens = torch.empty(rows, dtype=torch.int64)
        addresses = (part.ctypes.data for part in columns)
        self._draw(logits.data_ptr(), rows, vocab, *addresses, tokens.data_ptr())
        return tokens
