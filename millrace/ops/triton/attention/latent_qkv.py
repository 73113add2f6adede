"""The two kernels around the projections of latent attention (`ops/attention/latent_qkv.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.attention.paged_kv import padded_dim
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

HEADS_AT_ONCE = 4


@triton.jit
def _write_kernel(
    projected, stride, norm, angles, angles_stride, kv, block_stride, block_ids, offsets, eps,
    RANK: tl.constexpr, RANK_P: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    wait_for_previous_kernel(EARLY)
    token = tl.program_id(0).to(tl.int64)
    d, h = tl.arange(0, RANK_P), tl.arange(0, HALF_P)
    is_latent, is_half = d < RANK, h < HALF
    own = projected + token * stride
    latent = tl.load(own + d, mask=is_latent, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
    normed = latent * scale * tl.load(norm + d, mask=is_latent, other=0.0)
    step: tl.constexpr = 2 if PAIRS else 1
    apart: tl.constexpr = 1 if PAIRS else HALF
    first = tl.load(own + RANK + h * step, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(own + RANK + apart + h * step, mask=is_half, other=0.0).to(tl.float32)
    cos = tl.load(angles + token * angles_stride + h, mask=is_half, other=0.0)
    sin = tl.load(angles + token * angles_stride + HALF + h, mask=is_half, other=0.0)
    place = kv + tl.load(block_ids + token) * block_stride + tl.load(offsets + token) * (RANK + 2 * HALF)
    kind = kv.dtype.element_ty
    tl.store(place + d, normed.to(kind), mask=is_latent)
    tl.store(place + RANK + h, (first * cos - second * sin).to(kind), mask=is_half)
    tl.store(place + RANK + HALF + h, (second * cos + first * sin).to(kind), mask=is_half)


@triton.jit
def _join_kernel(
    latents, latents_stride, latents_head, rotated, rotated_stride, rotated_head, angles, angles_stride, out, heads,
    RANK: tl.constexpr, RANK_P: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for a few heads of a token."""
    wait_for_previous_kernel(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d, h = tl.arange(0, RANK_P), tl.arange(0, HALF_P)
    is_latent = (head < heads)[:, None] & (d < RANK)[None, :]
    is_half = (head < heads)[:, None] & (h < HALF)[None, :]
    to = out + ((token * heads + head) * (RANK + 2 * HALF))[:, None]
    own = latents + token * latents_stride + (head * latents_head)[:, None]
    tl.store(to + d[None, :], tl.load(own + d[None, :], mask=is_latent, other=0.0), mask=is_latent)
    step: tl.constexpr = 2 if PAIRS else 1
    apart: tl.constexpr = 1 if PAIRS else HALF
    part = rotated + token * rotated_stride + (head * rotated_head)[:, None] + (h * step)[None, :]
    first = tl.load(part, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(part + apart, mask=is_half, other=0.0).to(tl.float32)
    cos = tl.load(angles + token * angles_stride + h, mask=h < HALF, other=0.0)[None, :]
    sin = tl.load(angles + token * angles_stride + HALF + h, mask=h < HALF, other=0.0)[None, :]
    kind = out.dtype.element_ty
    tl.store(to + RANK + h[None, :], (first * cos - second * sin).to(kind), mask=is_half)
    tl.store(to + RANK + HALF + h[None, :], (second * cos + first * sin).to(kind), mask=is_half)


class LatentQkvKernels:
    def __init__(self, rank: int, rope_dim: int, pairs_neighbours: bool, eps: float, norm: Tensor) -> None:
        self._eps, self._norm = eps, norm
        self._rank, self._rope_dim = rank, rope_dim
        half = rope_dim // 2
        self._sizes = {
            "RANK": rank,
            "RANK_P": padded_dim(rank),
            "HALF": half,
            "HALF_P": triton.next_power_of_2(half),
            "PAIRS": pairs_neighbours,
        }

    def write(self, projected: Tensor, angles: Tensor, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
        if not len(projected):
            return
        assert projected.stride(1) == 1
        assert angles.stride(1) == 1
        _write_kernel[(len(projected),)](
            *(projected, projected.stride(0), self._norm, angles, angles.stride(0)),
            *(kv, kv.stride(1), block_ids, offsets, self._eps),
            **self._sizes,
            **pdl_options(kv.device),
        )

    def join(self, latents: Tensor, rotated: Tensor, angles: Tensor) -> Tensor:
        tokens, heads, _ = latents.shape
        out = torch.empty((tokens, heads, self._rank + self._rope_dim), dtype=latents.dtype, device=latents.device)
        if not tokens:
            return out
        assert latents.stride(2) == rotated.stride(2) == angles.stride(1) == 1
        _join_kernel[(tokens, triton.cdiv(heads, HEADS_AT_ONCE))](
            *(latents, latents.stride(0), latents.stride(1), rotated, rotated.stride(0), rotated.stride(1)),
            *(angles, angles.stride(0), out, heads),
            HEADS=HEADS_AT_ONCE,
            **self._sizes,
            **pdl_options(out.device),
        )
        return out
