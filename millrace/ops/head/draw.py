"""Draws tokens from logits with the C++ kernel (cpp/draw.cpp): one or two passes per row, without temporary tensors.

The reference is the torch code in run/sampling/sampler.py, which also runs where there is no compiler.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.ops.cpp.native import native, native_missing

__all__ = ["NativeDraw", "native_missing"]

Floats = npt.NDArray[np.float32]


def checked_masks(
    index: npt.NDArray[np.int64], bits: npt.NDArray[np.uint32], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Contiguous masks, one of ceil(vocab / 32) words for each index."""
    shape = (len(index), -(-vocab_size // 32))
    if bits.shape != shape or bits.dtype != np.uint32:
        raise ValueError(f"masks are {bits.dtype} {bits.shape}, but must be uint32 {shape}: a bit for each token")
    return np.ascontiguousarray(index, np.int64), np.ascontiguousarray(bits)


class NativeDraw:
    def __init__(self) -> None:
        self._draw, self._mask = native().without_gil.draw, native().without_gil.mask

    def mask(self, logits: Tensor, index: npt.NDArray[np.int64], bits: npt.NDArray[np.uint32]) -> None:
        """Set the logits of tokens that may not be drawn to -inf, in the rows `index` of logits [n, vocab], float32 and
        contiguous. Bit t % 32 of word t // 32 of `bits` is 1 if token t may be drawn."""
        assert logits.is_contiguous()
        index, bits = checked_masks(index, bits, logits.shape[1])
        self._mask(logits.data_ptr(), logits.shape[1], index.ctypes.data, bits.ctypes.data, len(index))

    def __call__(
        self,
        logits: Tensor,
        temperature: Floats,
        top_k: npt.NDArray[np.int64],
        top_p: Floats,
        min_p: Floats,
        uniforms: npt.NDArray[np.float64],
    ) -> Tensor:
        """Token ids, int64 [n], from float32 logits [n, vocab]. Temperature 0 is greedy: the first token with the
        highest logit. top_k 0 keeps all tokens. `uniforms` in [0, 1) select the position in the cumulative
        distribution."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        columns = [np.ascontiguousarray(part) for part in (temperature, top_k, top_p, min_p, uniforms)]
        tokens = torch.empty(rows, dtype=torch.int64)
        addresses = (part.ctypes.data for part in columns)
        self._draw(logits.data_ptr(), rows, vocab, *addresses, tokens.data_ptr())
        return tokens
