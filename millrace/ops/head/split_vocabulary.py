"""Embedding and LM head whose vocabulary is split over the ranks of a mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.base.mesh import Mesh
from millrace.ops.head.embedding import Embedding
from millrace.ops.linear.dense import Head


class SplitEmbedding:
    """Every rank looks up its own tokens; the sum with the zeros of the others is exact."""

    matrix = None

    def __init__(self, own: Embedding, tokens: range, vocab_size: int, mesh: Mesh) -> None:
        self._own, self._tokens, self._vocab_size, self._mesh = own, tokens, vocab_size, mesh

    def __call__(self, token_ids: Tensor) -> Tensor:
        # On a GPU nothing waits for the device.
        is_checked = not token_ids.is_cuda and len(token_ids) > 0
        if is_checked and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self._vocab_size:
            wrong = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
            raise IndexError(f"token id {int(wrong[0])} is outside the vocabulary of {self._vocab_size}")
        first, last = self._tokens.start, self._tokens.stop - 1
        is_elsewhere = (token_ids < first) | (token_ids > last)
        rows = self._own(token_ids.clamp(first, last) - first)
        summed = self._mesh.sum(rows.float().masked_fill_(is_elsewhere[:, None], 0.0))
        return summed.to(rows.dtype)


class SplitHead(Head):
    """Every rank computes the logits of its own tokens and gets those of the others."""

    def __init__(self, own: Head, widths: tuple[int, ...], mesh: Mesh, dtype: torch.dtype) -> None:
        """`widths`: how many tokens each rank has."""
        self._own, self._widths, self._mesh, self._dtype = own, widths, mesh, dtype
        self.num_bytes, self.has_decode_kernel = own.num_bytes, own.has_decode_kernel

    def __call__(self, x: Tensor) -> Tensor:
        return self.wide(x).to(self._dtype)

    def wide(self, x: Tensor, out: Tensor | None = None, decode: bool = False) -> Tensor:
        return self._mesh.gather(self._own.wide(x, decode=decode), self._widths)
