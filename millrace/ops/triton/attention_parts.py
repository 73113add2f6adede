"""What the kernels of paged attention share: their inner step, and the descriptions of rows and heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.kv_cache import holds_fp8
from millrace.ops.quantised import FP8


@triton.jit
def _scores(q, k, k_scales, softmax_scale, CAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr):
    """In units of log2, capped if the model caps."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if FP8:
        s = s * k_scales[None, :]
    return _capped(s, softmax_scale, CAP)


@triton.jit
def _capped(s, softmax_scale, CAP: tl.constexpr):
    """Products as scores in units of log2."""
    if CAP > 0.0:
        x = s * (softmax_scale / CAP)
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -t, t) * (CAP * 1.4426950408889634)
    return s * (softmax_scale * 1.4426950408889634)


@triton.jit
def _widen(x):
    """Numbers in eight bits as bfloat16, where they are: a plain conversion would first be brought, byte by byte, to
    the places in which the product takes its operand."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b, h0, h1, h2, h3; .reg .b32 low, high; .reg .f32 f0, f1, f2, f3; mov.b32 {a, b}, $2; "
        "cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b; mov.b32 {h0, h1}, low; mov.b32 {h2, h3}, high; "
        "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3; "
        "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }",
        "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _accumulate(
    acc, m, z, s, v, v_scales, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr, HOPPER: tl.constexpr
):  # fmt: skip
    """One step of the running softmax. A row that has seen no key yet keeps a maximum of -inf and weights of 0."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - safe[:, None])
    alpha = tl.math.exp2(m - safe)
    z = z * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if FP8:
        p = p * v_scales[None, :]
        if HOPPER and DTYPE == tl.bfloat16:
            v = _widen(v)
    v = v.to(DTYPE)
    acc = tl.dot(p.to(DTYPE), v, acc, input_precision=PRECISION)
    return acc, m_new, z


@triton.jit
def _accumulate_swapped(
    acc, m, z, q, k, v, inside, softmax_scale, CAP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One step with keys, not queries, along the longer side of the matrix unit, which then takes them from where they
    were loaded to: q [D, GP], acc [D, GP], m [GP]; and z [TILE, GP], to be summed over keys in the end."""
    s = _capped(tl.dot(k, q, input_precision=PRECISION), softmax_scale, CAP)
    s = tl.where(inside[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - safe[None, :])
    alpha = tl.math.exp2(m - safe)
    z = z * alpha[None, :] + p
    acc = acc * alpha[None, :]
    acc = tl.dot(tl.trans(v), p.to(DTYPE), acc, input_precision=PRECISION)
    return acc, m_new, z


@triton.jit
def _blocks_of(table, keys, end, BS: tl.constexpr):
    """The blocks that hold positions `keys` of a row; the scratch block for positions from `end` on."""
    return tl.load(table + keys // BS, mask=keys < end, other=0)


@triton.jit
def _places(blocks, keys, head_offset, block_stride, d, D: tl.constexpr, BS: tl.constexpr, WIDE: tl.constexpr):
    """[keys, d]: where one head's keys, or values, are inside the cache."""
    if WIDE:
        blocks = blocks.to(tl.int64)
    return (blocks * block_stride + head_offset + (keys % BS) * D)[:, None] + d[None, :]


@triton.jit
def _load_scales(ptr, blocks, keys, inside, head_offset, block_stride, D: tl.constexpr, BS: tl.constexpr,
                 WIDE: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """The scales [keys] that follow a head's items in each block; offsets count bytes. Ones where there are none."""
    if FP8:
        if WIDE:
            blocks = blocks.to(tl.int64)
        at = ((blocks * block_stride + head_offset + BS * D) >> 2) + keys % BS
        return tl.load(ptr + at, mask=inside, other=0.0)
    else:
        return tl.full(keys.shape, 1.0, tl.float32)


@triton.jit
def _load_keys(k_ptr, where, d, D: tl.constexpr, DP: tl.constexpr, DTYPE: tl.constexpr):
    """Keys [TILE, DP]. Those beyond the row's last may be anything: their scores are masked."""
    if DP == D:
        k = tl.load(k_ptr + where)
    else:
        k = tl.load(k_ptr + where, mask=(d < D)[None, :], other=0.0)
    return k.to(DTYPE)


@triton.jit
def _load_values(v_ptr, where, inside, d, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Values [TILE, DP], with MASKED zero where not `inside`: a value of NaN would spread even with no weight."""
    if MASKED:
        if DP == D:
            v = tl.load(v_ptr + where, mask=inside[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + where, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif DP == D:
        v = tl.load(v_ptr + where)
    else:
        v = tl.load(v_ptr + where, mask=(d < D)[None, :], other=0.0)
    return v


TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a launch finds its rows. All tensors int32 on the device."""

    query_starts: Tensor
    seq_lens: Tensor
    table_rows: Tensor
    """[n]: the row of `block_tables` that each row reads."""
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def padded_group(shape: HeadShape) -> int:
    return max(16, int(triton.next_power_of_2(shape.group)))


def padded_dim(head_dim: int) -> int:
    """The matrix unit multiplies no fewer than 16 at a time."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def is_wide(kv: Tensor) -> bool:
    """Offsets inside the cache need 64 bits."""
    return kv[0].numel() >= 2**31


def cache_pointers(kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What a kernel is handed of a layer: keys, values, and the scales of each where the cache holds eight bits."""
    if not holds_fp8(kv):
        return kv[0], kv[1], None, None
    items, words = kv.view(FP8), kv.view(torch.float32)
    return items[0], items[1], words[0], words[1]


def head_items(kv: Tensor) -> int:
    """Items, scales included, of one head in a block: how far one head is from the next."""
    return kv.shape[3] * kv.shape[4]


def precision(queries: Tensor) -> str:
    return "ieee" if queries.dtype == torch.float32 else "tf32"
