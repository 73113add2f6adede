"""Between the projections of latent attention and attention: the norm of latents, RoPE, and what the cache holds.

make(rank, rope_dim, pairs_neighbours, eps, norm, rms_norm) -> LatentQkv. `norm` is the latents' weight, float32 [rank];
`rms_norm` the op chosen for this device. With `pairs_neighbours` x[2i] is rotated with x[2i + 1] instead of x[i] with
x[i + rope_dim / 2]; the result has the order of the second, which does not matter: queries and keys have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.ops.base.version import Version
from millrace.ops.elementwise.rope import rope
from millrace.ops.kv.cache import write_kv
from millrace.ops.triton import triton_missing


class LatentQkv(Protocol):
    def write(self, projected: Tensor, angles: Tensor, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        """projected [T, rank + rope_dim] -> the cache: normed latents, then the rotated part of the keys."""
        ...

    def join(self, latents: Tensor, rotated: Tensor, angles: Tensor) -> Tensor:
        """Queries as latents [T, heads, rank] and their part to rotate [T, heads, rope_dim] -> one after the other."""
        ...


class TorchLatentQkv:
    """The reference."""

    def __init__(
        self, rank: int, rope_dim: int, pairs_neighbours: bool, eps: float, norm: Tensor, rms_norm: Callable[..., Any]
    ) -> None:
        self._parts, self._pairs_neighbours = [rank, rope_dim], pairs_neighbours
        self._eps, self._norm, self._rms_norm = eps, norm, rms_norm

    def write(self, projected: Tensor, angles: Tensor, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        latents, keys = torch.split(projected, self._parts, dim=1)
        latents = self._rms_norm(latents.contiguous(), self._norm, self._eps)
        cached = torch.cat((latents, self._rotated(keys[:, None], angles)[:, 0]), dim=1)
        write_kv(cached[:, None, None], kv, block_ids, offsets)

    def join(self, latents: Tensor, rotated: Tensor, angles: Tensor) -> Tensor:
        return torch.cat((latents, self._rotated(rotated, angles)), dim=2)

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        if self._pairs_neighbours:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=2)
        return rope(x, angles)


def make_triton(
    rank: int, rope_dim: int, pairs_neighbours: bool, eps: float, norm: Tensor, rms_norm: Callable[..., Any]
) -> LatentQkv:
    from millrace.ops.triton.attention.latent_qkv import LatentQkvKernels  # local: imports Triton

    return LatentQkvKernels(rank, rope_dim, pairs_neighbours, eps, norm)


VERSIONS = (
    Version(
        op="latent_qkv",
        name="triton",
        make=make_triton,
        when="Triton: a kernel that writes the cache, and one that joins queries",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="latent_qkv",
        name="reference",
        make=TorchLatentQkv,
        when="the reference: one op after the other",
        invariant_on=("cpu",),
    ),
)
