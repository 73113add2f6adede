"""Between the QKV projection and attention: QK norm, RoPE, and writing keys and values to the KV cache.

make(num_heads, num_kv_heads, head_dim, eps, q_norm, k_norm, key_shift=None) -> PrepareQkv. Norm weights are float32
[head_dim] or None. key_shift, float32 [kv_heads, head_dim], is subtracted from the keys that go to a four-bit cache: it
adds the same number to all scores of a query, which the softmax ignores.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from millrace.ops.base.version import Version
from millrace.ops.cpp.native import DTYPES, KV_DTYPES, native, native_missing
from millrace.ops.elementwise.norm import rms_norm
from millrace.ops.elementwise.rope import rope
from millrace.ops.kv.cache import is_four_bit, write_kv
from millrace.ops.triton import triton_missing

MAX_HEAD_DIM = 512
"""Limit of cpp/elementwise.cpp."""


class PrepareQkv(Protocol):
    def __call__(self, qkv: Tensor, angles: Tensor | None, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) · head_dim]; `angles` [T, r] from `rope_angles`, or None for no rotation.

        Returns queries [T, heads, head_dim], possibly a view of qkv, which may be overwritten."""
        ...


class TorchPrepareQkv:
    """The reference: norm, rotation and cache write in sequence; computed in float32, rounded once."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        key_shift: Tensor | None = None,
    ) -> None:
        self.heads = [num_heads, num_kv_heads, num_kv_heads]
        self.head_dim = head_dim
        self.eps = eps
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.key_shift = key_shift

    def __call__(self, qkv: Tensor, angles: Tensor | None, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        queries, keys, values = torch.split(heads, self.heads, dim=1)
        queries, keys = self._prepare(queries, self.q_norm, angles), self._prepare(keys, self.k_norm, angles)
        if self.key_shift is not None and is_four_bit(kv):
            keys, values = keys.float() - self.key_shift, values.float()
        write_kv(torch.stack((keys, values), dim=1), kv, block_ids, offsets)
        return queries

    def _prepare(self, heads: Tensor, norm: Tensor | None, angles: Tensor | None) -> Tensor:
        dtype = heads.dtype
        if norm is not None:
            heads = rms_norm(heads.float(), norm, self.eps)
        if angles is not None:
            heads = rope(heads, angles)
        return heads.to(dtype)


class NativePrepareQkv:
    """Overwrites the queries in place and writes keys and values directly to the cache."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        key_shift: Tensor | None = None,
    ) -> None:
        self._native = native()
        self._sizes = (num_heads, num_kv_heads, head_dim)
        self._eps = eps
        self.vectors = (q_norm, k_norm, key_shift)
        self.vectors_at = tuple(None if vector is None else vector.data_ptr() for vector in self.vectors)
        """Addresses of the norm weights and of the key shift."""

    def __call__(self, qkv: Tensor, angles: Tensor | None, kv: Tensor, block_ids: Tensor, offsets: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self._sizes
        tokens = qkv.shape[0]
        self._native.for_rows(tokens).prepare_qkv(
            DTYPES[qkv.dtype],
            KV_DTYPES[kv.dtype],
            qkv.data_ptr(),
            None if angles is None else angles.data_ptr(),
            *self.vectors_at,
            kv.data_ptr(),
            block_ids.data_ptr(),
            offsets.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            0 if angles is None else angles.shape[1],
            kv.shape[1],
            kv.shape[3],
            self._eps,
        )
        return qkv.view(tokens, -1, head_dim)[:, :heads]


def make_triton(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    key_shift: Tensor | None = None,
) -> PrepareQkv:
    from millrace.ops.triton.attention.qkv import PrepareQkvKernel

    return PrepareQkvKernel(num_heads, num_kv_heads, head_dim, eps, q_norm, k_norm, key_shift)


VERSIONS = (
    Version(
        op="qkv",
        name="native",
        make=NativePrepareQkv,
        when="C++: norm, rotation and cache write of a token in one pass",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        fits=lambda shape: bool(shape["head_dim"] <= MAX_HEAD_DIM),
        missing=native_missing,
    ),
    Version(
        op="qkv",
        name="triton",
        make=make_triton,
        when="Triton: norm, rotation and cache write in one kernel",
        devices=("cuda",),
        invariant_on=("cuda",),
        fits=lambda shape: bool(shape["head_dim"] % 2 == 0),
        missing=triton_missing,
    ),
    Version(
        op="qkv",
        name="torch",
        make=TorchPrepareQkv,
        when="the reference: norm, rotation and cache write in sequence, in float32",
        invariant_on=("cpu",),
    ),
)
