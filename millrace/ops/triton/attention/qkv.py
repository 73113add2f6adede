"""QK-norm, rotary embedding and the KV cache write of one step in a single pass over the fused projection.

A program takes a few heads of one token. Query and key heads are rewritten in place; key and value heads also go to the
cache. Afterwards the projection's buffer holds the step's own queries, keys and values, ready for attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.quantised import FP8_MAX
from millrace.ops.kv.cache import format_of, is_packed
from millrace.ops.kv.packed import can_pack
from millrace.ops.triton.attention.four_bits import _store_four_bits
from millrace.ops.triton.attention.paged_kv import (
    _scales_of,
    cache_pointers,
    head_items,
    item_strides,
    items_apart,
    padded_dim,
)
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one token per program, and warps."""

    heads: int
    warps: int


FEW = Shape(8, 4)
SOME, SOME_TOKENS = Shape(16, 4), 384
MANY, MANY_TOKENS = Shape(64, 8), 1024
"""SOME and MANY: shapes for more than SOME_TOKENS and more than MANY_TOKENS tokens."""


def shape_for(tokens: int, heads: int, norm: bool, packed: bool = False) -> Shape:
    """Many small programs for few tokens, large ones for many. With a packed cache they stay small enough that some
    have only query heads and skip the packing. With QK norm the shape is the same for any number of tokens, so that the
    order of summation, and the result, never changes."""
    if norm or tokens <= SOME_TOKENS:
        return FEW
    if tokens <= MANY_TOKENS or packed:
        return SOME
    return Shape(min(MANY.heads, triton.next_power_of_2(heads)), MANY.warps)


@triton.jit
def _norm_weights(q_norm_ptr, k_norm_ptr, is_query, i, COUNT: tl.constexpr):
    """[heads, items]: weights of the query norm for query heads, of the key norm for the others."""
    q_norm = tl.load(q_norm_ptr + i, mask=i < COUNT, other=0.0)
    k_norm = tl.load(k_norm_ptr + i, mask=i < COUNT, other=0.0)
    return tl.where(is_query[:, None], q_norm[None, :], k_norm[None, :])


@triton.jit
def _largest(x):
    """[heads]: largest absolute value."""
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def _to_fp8(x, scales, MOST: tl.constexpr):
    """[heads, items] divided by the scales [heads], clamped to the range of FP8."""
    wide = tl.div_rn(x.to(tl.float32), scales[:, None] + tl.zeros(x.shape, tl.float32))
    return tl.minimum(tl.maximum(wide, -MOST), MOST).to(tl.float8e4nv)


@triton.jit
def _bits(x):
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _quarters(half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The two quarters [heads, D / 4] in a half [heads, D / 2] of each vector."""
    return tl.split(tl.permute(tl.reshape(half, [HEADS, 2, HALF // 2]), (0, 2, 1)))


@triton.jit
def _kept(bits, top):
    """Sign, mantissa and four exponent bits of each number, relative to the head's largest exponent `top`."""
    size = (bits & 0x7FFF) - ((top[:, None] - 15) << 7)
    return tl.minimum(tl.maximum(size, 0), 0x07FF) | (bits & 0x8000)


@triton.jit
def _pack(left, right, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The format of `ops/kv/packed.py`: from bfloat16 halves [heads, D / 2] to three int16 words [heads, D / 4], and
    the scales [heads], bfloat16 as int16."""
    left, right = _bits(left), _bits(right)
    top = tl.maximum(tl.max(left & 0x7FFF, 1), tl.max(right & 0x7FFF, 1)) >> 7
    first, second = _quarters(_kept(left, top), HEADS, HALF)
    third, last = _quarters(_kept(right, top), HEADS, HALF)
    last = (last & 0x07FF) | ((last & 0x8000) >> 4)
    first = first | (last & 0xF) << 11
    second = second | (last >> 4 & 0xF) << 11
    third = third | (last >> 8) << 11
    return first.to(tl.int16), second.to(tl.int16), third.to(tl.int16), (top << 7).to(tl.int16)


@triton.jit
def _store_packed(left, right, places, scales_ptr, cached, HEADS: tl.constexpr, HALF: tl.constexpr,
                  BS: tl.constexpr):  # fmt: skip
    PLANE: tl.constexpr = BS * HALF // 2
    first, second, third, scales = _pack(left, right, HEADS, HALF)
    to = places + tl.arange(0, HALF // 2)[None, :]
    tl.store(to, first, mask=cached[:, None])
    tl.store(to + PLANE, second, mask=cached[:, None])
    tl.store(to + 2 * PLANE, third, mask=cached[:, None])
    tl.store(scales_ptr, scales, mask=cached)


@triton.jit
def _store_fp8(left, right, rest, places, scales_ptr, cached, HEADS: tl.constexpr, HALF: tl.constexpr,
               HP: tl.constexpr, REST: tl.constexpr, RP: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    largest = tl.maximum(_largest(left), _largest(right))
    if REST > 0:
        largest = tl.maximum(largest, _largest(rest))
    scales = tl.where(largest > 0, tl.div_rn(largest, tl.full([HEADS], MOST, tl.float32)), 1.0)
    tl.store(scales_ptr, scales, mask=cached)
    left, right, rest = _to_fp8(left, scales, MOST), _to_fp8(right, scales, MOST), _to_fp8(rest, scales, MOST)
    _store_items(left, right, rest, places, cached, HALF, HP, REST, RP)


@triton.jit
def _store_items(left, right, rest, places, cached, HALF: tl.constexpr, HP: tl.constexpr, REST: tl.constexpr,
                 RP: tl.constexpr):  # fmt: skip
    i, r = tl.arange(0, HP), tl.arange(0, RP)
    kind = places.dtype.element_ty
    tl.store(places + i[None, :], left.to(kind), mask=cached[:, None] & (i < HALF)[None, :])
    tl.store(places + HALF + i[None, :], right.to(kind), mask=cached[:, None] & (i < HALF)[None, :])
    if REST > 0:
        tl.store(places + 2 * HALF + r[None, :], rest.to(kind), mask=cached[:, None] & (r < REST)[None, :])


@triton.jit
def _qkv_kernel(
    qkv_ptr, angles_ptr, q_norm_ptr, k_norm_ptr, shift_ptr, kv_ptr, scales_ptr, blocks_ptr, offsets_ptr, eps,
    qkv_stride, value_stride, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr, REST: tl.constexpr, RP: tl.constexpr, BS: tl.constexpr, ITEMS: tl.constexpr,
    HEAD_ITEMS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, MOST: tl.constexpr,
    ROTATE: tl.constexpr, SHIFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first 2 · HALF items of a head are rotated in pairs (i, i + HALF); REST further items are not."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_query = heads < HEADS
    is_value = heads >= HEADS + KV_HEADS
    exists = heads < HEADS + 2 * KV_HEADS
    i = tl.arange(0, HP)
    # Cache positions and angles were written at the start of the step: load them before waiting for the previous
    # kernel.
    block = tl.load(blocks_ptr + token).to(tl.int64)
    offset = tl.load(offsets_ptr + token).to(tl.int64)
    if ROTATE:
        cos = tl.load(angles_ptr + token * 2 * HALF + i, mask=i < HALF, other=1.0)[None, :]
        sin = tl.load(angles_ptr + token * 2 * HALF + HALF + i, mask=i < HALF, other=0.0)[None, :]
    wait_for_previous_kernel(EARLY)
    pair = exists[:, None] & (i < HALF)[None, :]
    base = qkv_ptr + token * qkv_stride + heads[:, None] * D
    left_raw = tl.load(base + i[None, :], mask=pair, other=0.0)
    right_raw = tl.load(base + HALF + i[None, :], mask=pair, other=0.0)
    left, right = left_raw.to(tl.float32), right_raw.to(tl.float32)
    r = tl.arange(0, RP)
    tail = exists[:, None] & (r < REST)[None, :]
    if REST > 0:
        rest_raw = tl.load(base + 2 * HALF + r[None, :], mask=tail, other=0.0)
        rest = rest_raw.to(tl.float32)
    if NORM:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = 1.0 / tl.sqrt(squares / D + eps)
        left = left * scale[:, None] * _norm_weights(q_norm_ptr, k_norm_ptr, is_query, i, HALF)
        right = right * scale[:, None] * _norm_weights(q_norm_ptr + HALF, k_norm_ptr + HALF, is_query, i, HALF)
        if REST > 0:
            rest = rest * scale[:, None]
            rest = rest * _norm_weights(q_norm_ptr + 2 * HALF, k_norm_ptr + 2 * HALF, is_query, r, REST)
    if ROTATE:
        turned = left * cos - right * sin
        right = right * cos + left * sin
        left = turned
    dtype = qkv_ptr.dtype.element_ty
    left = tl.where(is_value[:, None], left_raw, left.to(dtype))
    right = tl.where(is_value[:, None], right_raw, right.to(dtype))
    mine = pair & (heads < HEADS + KV_HEADS)[:, None]
    tl.store(base + i[None, :], left, mask=mine)
    tl.store(base + HALF + i[None, :], right, mask=mine)

    if REST > 0:
        rest = tl.where(is_value[:, None], rest_raw, rest.to(dtype))
        tl.store(base + 2 * HALF + r[None, :], rest, mask=tail & (heads < HEADS + KV_HEADS)[:, None])
    else:
        rest = left
    if (tl.program_id(1) + 1) * BLOCK_H > HEADS:  # otherwise all heads are queries
        kv_head = tl.where(is_value, heads - HEADS - KV_HEADS, heads - HEADS)
        to_values = tl.where(is_value, value_stride, 0)
        places = kv_ptr + (block * block_stride + to_values + kv_head * HEAD_ITEMS + offset * ITEMS)[:, None]
        first_scale = block * block_stride + _scales_of(kv_head, KV_HEADS, BS, ITEMS, HEAD_ITEMS, FORMAT)
        cached = exists & (heads >= HEADS)
        if FORMAT == "packed":
            to = kv_ptr + (first_scale + 2 * offset + is_value.to(tl.int64))  # the value's scale beside the key's
            _store_packed(left, right, places, to, cached, BLOCK_H, HALF, BS)
        elif FORMAT == "fp8":
            to = scales_ptr + (first_scale + to_values) // 4 + offset
            _store_fp8(left, right, rest, places, to, cached, BLOCK_H, HALF, HP, REST, RP, MOST)
        elif FORMAT == "int4":
            tl.debug_barrier()  # heads are read again whole, also what other threads have rotated
            d = tl.arange(0, DP)
            whole = tl.load(base + d[None, :], mask=cached[:, None] & (d < D)[None, :], other=0.0)
            if SHIFT:
                shifted = (cached & ~is_value)[:, None] & (d < D)[None, :]
                whole = whole.to(tl.float32) - tl.load(shift_ptr + kv_head[:, None] * D + d[None, :], shifted, 0.0)
            to = scales_ptr + (first_scale + to_values) // 4 + offset
            _store_four_bits(whole, ~is_value, places, to, cached, BLOCK_H, D, DP)
        else:
            _store_items(left, right, rest, places, cached, HALF, HP, REST, RP)


class PrepareQkvKernel:
    """make(num_heads, num_kv_heads, head_dim, eps, q_norm, k_norm, key_shift) of the op `qkv`."""

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
        self._sizes = (num_heads, num_kv_heads, head_dim)
        self._eps = eps
        if (q_norm is None) != (k_norm is None):
            raise ValueError("q_norm and k_norm must both be given, or neither")
        self._norms = (q_norm, k_norm)
        self._key_shift = key_shift

    def __call__(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        kv: Tensor,
        block_ids: Tensor,
        offsets: Tensor,
        shape: Shape | None = None,
    ) -> Tensor:
        heads, kv_heads, head_dim = self._sizes
        tokens = qkv.shape[0]
        half = head_dim // 2 if angles is None else angles.shape[1] // 2
        rest = head_dim - 2 * half
        q_norm, k_norm = self._norms
        packed = is_packed(kv)
        if packed and (rest or not can_pack(head_dim)):
            raise ValueError(
                f"a packed KV cache needs a head_dim of 64, 128 or 256, all of it rotated; got {2 * half} of {head_dim}"
            )
        cache, _, scales, _ = cache_pointers(kv)
        shape = shape or shape_for(tokens, heads + 2 * kv_heads, q_norm is not None, packed)
        block_h = shape.heads
        grid = (tokens, triton.cdiv(heads + 2 * kv_heads, block_h))
        _qkv_kernel[grid](
            qkv, angles, q_norm, k_norm, self._key_shift, cache, scales, block_ids, offsets, self._eps,
            qkv.stride(0), *item_strides(kv),
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, DP=padded_dim(head_dim), HALF=half,
            HP=triton.next_power_of_2(half), REST=rest, RP=triton.next_power_of_2(max(rest, 1)), BS=kv.shape[3],
            ITEMS=items_apart(kv, head_dim), HEAD_ITEMS=head_items(kv),
            FORMAT=format_of(kv), MOST=FP8_MAX, BLOCK_H=block_h,
            NORM=q_norm is not None, ROTATE=angles is not None, SHIFT=self._key_shift is not None,
            num_warps=shape.warps, **pdl_options(qkv.device),
        )  # fmt: skip
        return qkv.view(tokens, -1, head_dim)[:, :heads]
