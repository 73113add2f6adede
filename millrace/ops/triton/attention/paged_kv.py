"""Shared code of the paged attention kernels: reading the KV cache, the online softmax, descriptions of rows and heads.

These functions take the vectors of a head as tuples of parts: one whole vector for a plain or FP8 cache, four quarters
for a packed one (`ops/kv/packed.py`), two halves for one of four bits (`four_bits.py`), whose sums are computed one
after the other. With four bits, queries and sums have one more entry: the sum of a query's numbers, and the sum of what
is added to each value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.quantised import FP8
from millrace.ops.kv.cache import SCALE_WORDS, format_of, is_four_bit, is_fp8, is_packed
from millrace.ops.triton.attention.four_bits import (
    _from_halves,
    _load_numbers,
    _rotated_queries,
    _scale_and_offset,
)


@triton.jit
def _scores(q, k, k_scales, softmax_scale, CAP: tl.constexpr, PRECISION: tl.constexpr, FORMAT: tl.constexpr):
    """Scores in units of log2, with the model's softcap."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
    for part in tl.static_range(1, len(k)):
        s = tl.dot(q[part], tl.trans(k[part]), s, input_precision=PRECISION)
    if FORMAT == "int4":
        return _capped(s * k_scales[0][None, :] + q[2][:, None] * k_scales[1][None, :], softmax_scale, CAP)
    elif FORMAT != "plain" and CAP == 0.0:
        return s * (k_scales * (softmax_scale * 1.4426950408889634))[None, :]
    elif FORMAT != "plain":
        return _capped(s * k_scales[None, :], softmax_scale, CAP)
    else:
        return _capped(s, softmax_scale, CAP)


@triton.jit
def _capped(s, softmax_scale, CAP: tl.constexpr):
    """Scale products to scores in units of log2, with the softcap if CAP > 0."""
    if CAP > 0.0:
        x = s * (softmax_scale / CAP)
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -t, t) * (CAP * 1.4426950408889634)
    return s * (softmax_scale * 1.4426950408889634)


@triton.jit
def _widen(x):
    """FP8 to bfloat16 in place: a plain conversion would first be moved, byte by byte, into the register layout of the
    product's operand."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b, h0, h1, h2, h3; .reg .b32 low, high; .reg .f32 f0, f1, f2, f3; mov.b32 {a, b}, $2; "
        "cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b; mov.b32 {h0, h1}, low; mov.b32 {h2, h3}, high; "
        "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3; "
        "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }",
        "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _own_word(w, HOPPER: tl.constexpr):
    """The number in a packed word's own bits, as bfloat16 from 2^-15 to 2."""
    if HOPPER:  # pure and 16-bit, so the compiler runs it in the layout of the product's operand
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x87FF87FF, 0x38003800, 0xEA;", "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return ((w.to(tl.int32) & 0x87FF) | 0x3800).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _carried_word(a, b, c, HOPPER: tl.constexpr):
    """The number whose twelve bits are in three packed words, four bits each, the lowest first."""
    if HOPPER:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 11; lop3.b32 $0, t, 0x000F000F, 0x38003800, 0xEA; "
            "shr.u32 t, $2, 7; lop3.b32 $0, t, 0x00F000F0, $0, 0xEA; "
            "shr.u32 t, $3, 3; lop3.b32 $0, t, 0x07000700, $0, 0xEA; "
            "shl.b32 t, $3, 1; lop3.b32 $0, t, 0x80008000, $0, 0xEA; }",
            "=&r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    low, middle, high = a.to(tl.int32) >> 11 & 0xF, b.to(tl.int32) >> 7 & 0xF0, c.to(tl.int32)
    bits = low | middle | (high >> 3 & 0x700) | (high << 1 & 0x8000) | 0x3800
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _accumulate(
    acc, m, z, s, v, v_scales, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FORMAT: tl.constexpr, HOPPER: tl.constexpr
):  # fmt: skip
    """One step of the online softmax. A row that has seen no key yet keeps a maximum of -inf and weights of 0."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - safe[:, None])
    alpha = tl.math.exp2(m - safe)
    z = z * alpha + tl.sum(p, 1)
    if FORMAT == "int4":
        added = acc[2] * alpha + tl.sum(p * v_scales[1][None, :], 1)
        p = p * v_scales[0][None, :]
    elif FORMAT != "plain":
        p = p * v_scales[None, :]
    p = p.to(DTYPE)
    if len(acc) == 4:
        first = tl.dot(p, v[0], acc[0] * alpha[:, None], input_precision=PRECISION)
        second = tl.dot(p, v[1], acc[1] * alpha[:, None], input_precision=PRECISION)
        third = tl.dot(p, v[2], acc[2] * alpha[:, None], input_precision=PRECISION)
        fourth = tl.dot(p, v[3], acc[3] * alpha[:, None], input_precision=PRECISION)
        return (first, second, third, fourth), m_new, z
    elif FORMAT == "int4":
        first = tl.dot(p, v[0], acc[0] * alpha[:, None], input_precision=PRECISION)
        second = tl.dot(p, v[1], acc[1] * alpha[:, None], input_precision=PRECISION)
        return (first, second, added), m_new, z
    else:
        values = v[0]
        if FORMAT == "fp8" and HOPPER and DTYPE == tl.bfloat16:
            values = _widen(values)
        values = values.to(DTYPE)
        return (tl.dot(p, values, acc[0] * alpha[:, None], input_precision=PRECISION),), m_new, z


@triton.jit
def _accumulate_swapped(
    acc, m, z, q, k, v, seen, softmax_scale, CAP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One step with keys, not queries, along the longer side of the matrix instruction, which then reads them from
    shared memory: q [D, GP], seen [TILE, GP or 1], acc [D, GP], m [GP]; and z [TILE, GP], to be summed over keys at the
    end."""
    s = _capped(tl.dot(k[0], q[0], input_precision=PRECISION), softmax_scale, CAP)
    s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - safe[None, :])
    alpha = tl.math.exp2(m - safe)
    z = z * alpha[None, :] + p
    return (tl.dot(tl.trans(v[0]), p.to(DTYPE), acc[0] * alpha[None, :], input_precision=PRECISION),), m_new, z


@triton.jit
def _with_sinks(m, z, sinks):
    """(factor of the sums, m, z) after one more score per vector, whose value is zero; -inf adds nothing."""
    scores = sinks * 1.4426950408889634  # as exponents of 2
    top = tl.maximum(m, scores)
    safe = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.math.exp2(m - safe)
    return shrink, top, z * shrink + tl.math.exp2(scores - safe)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """Initial sums, in parts [ROWS, COLUMNS]."""
    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    if FORMAT == "packed":
        return zeros, zeros, zeros, zeros
    elif FORMAT == "int4":
        return zeros, zeros, tl.zeros([ROWS], tl.float32)
    else:
        return (zeros,)


@triton.jit
def _whole(parts, ROWS: tl.constexpr, DP: tl.constexpr):
    """[ROWS, DP]: the parts of each row's vector joined."""
    if len(parts) == 4:
        halves = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        return tl.reshape(tl.permute(halves, (0, 3, 2, 1)), [ROWS, DP])
    elif len(parts) == 3:
        return _from_halves(parts[0], parts[1], ROWS, DP) + parts[2][:, None]
    else:
        return parts[0]


@triton.jit
def _load_queries(at, mask, D: tl.constexpr, FORMAT: tl.constexpr):
    """The parts of queries; the first is at `at`. With four bits, `at` is where whole queries are."""
    if FORMAT == "packed":
        QUARTER: tl.constexpr = D // 4
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + QUARTER, mask=mask, other=0.0)
        third = tl.load(at + 2 * QUARTER, mask=mask, other=0.0)
        return first, second, third, tl.load(at + 3 * QUARTER, mask=mask, other=0.0)
    elif FORMAT == "int4":
        return _rotated_queries(tl.load(at, mask=mask, other=0.0), D)
    else:
        return (tl.load(at, mask=mask, other=0.0),)


@triton.jit
def _blocks_of(table, keys, end, BS: tl.constexpr):
    """Ids of the blocks that hold positions `keys` of a row; the scratch block from position `end` on."""
    return tl.load(table + keys // BS, mask=keys < end, other=0)


@triton.jit
def _places(blocks, keys, head_offset, block_stride, d, ITEMS: tl.constexpr, BS: tl.constexpr, WIDE: tl.constexpr):
    """[keys, d]: offsets in the cache of one head's keys (or values), ITEMS apart."""
    if WIDE:
        blocks = blocks.to(tl.int64)
    return (blocks * block_stride + head_offset + (keys % BS) * ITEMS)[:, None] + d[None, :]


@triton.jit
def _scales_of(head, KV_HEADS: tl.constexpr, BS: tl.constexpr, ITEMS: tl.constexpr, HEAD_ITEMS: tl.constexpr,
               FORMAT: tl.constexpr):  # fmt: skip
    """Offset of one head's scales in a block: after its own items, or after the items of all heads (packed)."""
    if FORMAT == "fp8" or FORMAT == "int4":
        return head * HEAD_ITEMS + BS * ITEMS
    else:
        return KV_HEADS * HEAD_ITEMS + head * (2 * BS)


@triton.jit
def _load_scales(k_ptr, v_ptr, blocks, keys, inside, scale_offset, block_stride, BS: tl.constexpr, WIDE: tl.constexpr,
                 FORMAT: tl.constexpr):  # fmt: skip
    """Scales [keys] of a head's keys, and of its values: ones for a plain cache, pairs (scale, offset) with four
    bits."""
    if FORMAT == "plain":
        ones = tl.full(keys.shape, 1.0, tl.float32)
        return ones, ones
    else:
        if WIDE:
            blocks = blocks.to(tl.int64)
        first = blocks * block_stride + scale_offset
        # Offsets count items: bytes (FP8, four bits) or 16-bit words (packed).
        if FORMAT == "packed":
            both = tl.load(k_ptr + ((first >> 1) + keys % BS), mask=inside, other=0)
            return _key_scales(both), _value_scales(both)
        else:
            where = (first >> 2) + keys % BS
            if FORMAT == "int4":
                keys, values = (
                    tl.load(k_ptr + where, mask=inside, other=0),
                    tl.load(v_ptr + where, mask=inside, other=0),
                )
                return _scale_and_offset(keys), _scale_and_offset(values)
            else:
                return tl.load(k_ptr + where, mask=inside, other=0.0), tl.load(v_ptr + where, mask=inside, other=0.0)


@triton.jit
def _key_scales(both):
    """The first of two bfloat16 numbers in a word, as float32."""
    return (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def _value_scales(both):
    return (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load_packed(ptr, where, D: tl.constexpr, BS: tl.constexpr, DTYPE: tl.constexpr, HOPPER: tl.constexpr):
    """The quarters of packed vectors. Any bits are finite numbers; a scale of 0 masks them."""
    PLANE: tl.constexpr = BS * D // 4
    a, b, c = tl.load(ptr + where), tl.load(ptr + where + PLANE), tl.load(ptr + where + 2 * PLANE)
    first, second, third = _own_word(a, HOPPER), _own_word(b, HOPPER), _own_word(c, HOPPER)
    return first.to(DTYPE), second.to(DTYPE), third.to(DTYPE), _carried_word(a, b, c, HOPPER).to(DTYPE)


@triton.jit
def _load_unpacked(ptr, where, scales, D: tl.constexpr, BS: tl.constexpr, DTYPE: tl.constexpr, HOPPER: tl.constexpr):
    """Packed vectors unpacked: joined and scaled, which is exact. For kernels with many queries, which write them to
    shared memory again anyway."""
    a, b, c, e = _load_packed(ptr, where, D, BS, DTYPE, HOPPER)
    scales = scales.to(DTYPE)[:, None]
    return (_whole((a * scales, b * scales, c * scales, e * scales), where.shape[0], D),)


@triton.jit
def _load_keys(k_ptr, where, d, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, DTYPE: tl.constexpr,
               FORMAT: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """The parts of keys. Those past the row's end may be anything: their scores are masked."""
    if FORMAT == "packed":
        return _load_packed(k_ptr, where, D, BS, DTYPE, HOPPER)
    elif FORMAT == "int4":
        return _load_numbers(k_ptr, where, d, D, DP, DTYPE)
    elif DP == D:
        return (tl.load(k_ptr + where).to(DTYPE),)
    else:
        return (tl.load(k_ptr + where, mask=(d < D)[None, :], other=0.0).to(DTYPE),)


@triton.jit
def _load_values(v_ptr, where, inside, d, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, MASKED: tl.constexpr,
                 DTYPE: tl.constexpr, FORMAT: tl.constexpr, HOPPER: tl.constexpr):  # fmt: skip
    """The parts of values. With MASKED, zero where not `inside`: a NaN would spread even with weight 0."""
    if FORMAT == "packed":
        return _load_packed(v_ptr, where, D, BS, DTYPE, HOPPER)
    elif FORMAT == "int4":
        return _load_numbers(v_ptr, where, d, D, DP, DTYPE)
    elif MASKED:
        if DP == D:
            return (tl.load(v_ptr + where, mask=inside[:, None], other=0.0),)
        else:
            return (tl.load(v_ptr + where, mask=inside[:, None] & (d < D)[None, :], other=0.0),)
    elif DP == D:
        return (tl.load(v_ptr + where),)
    else:
        return (tl.load(v_ptr + where, mask=(d < D)[None, :], other=0.0),)


PARTS = {"packed": 4, "int4": 2}
"""Parts of a vector in formats that have several."""
TILE_VECTORS = 16
"""Vectors on the shorter side of a matrix instruction."""
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a launch. All tensors are int32 on the device."""

    query_starts: Tensor
    seq_lens: Tensor
    table_rows: Tensor
    """[n]: the row of `block_tables` that each row reads."""
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def queries_per_program(self, queries_per_row: int, limit: int) -> int:
        """Queries of a decode row in one program: as many as fill one side of a matrix instruction, or `limit`."""
        return max(1, min(queries_per_row, TILE_VECTORS // self.group, limit))


def padded_vectors(shape: AttentionShape) -> int:
    """Query vectors of a program, for any number of queries per row: whole sides of a matrix instruction."""
    return max(TILE_VECTORS, int(triton.next_power_of_2(shape.group)))


def padded_dim(head_dim: int) -> int:
    """At least 16, the smallest side of a matrix instruction."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def is_wide(kv: Tensor) -> bool:
    """True if offsets in the cache need 64 bits."""
    return kv[0].nbytes // item_bytes(kv) >= 2**31


def cache_pointers(kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Kernel arguments for a layer's cache: keys, values and their scales. A packed cache has one tensor with the
    scales of both, a plain one has none."""
    if is_four_bit(kv):
        items = kv.view(torch.uint8)
        return items[0], items[1], kv[0], kv[1]
    if not is_fp8(kv) and not is_packed(kv):
        return kv[0], kv[1], None, None
    if is_packed(kv):
        return kv[0], kv[1], kv.view(torch.int32)[0], None
    items, scales = kv.view(FP8), kv.view(torch.float32)
    return items[0], items[1], scales[0], scales[1]


def cache_sizes(kv: Tensor, shape: AttentionShape) -> dict[str, int | str]:
    """Constexprs that describe the layout of a layer's cache. Queries and sums come in parts of PART items."""
    width = padded_dim(shape.head_dim)
    return {
        "D": shape.head_dim,
        "DP": width,
        "PART": width // PARTS.get(format_of(kv), 1),
        "BS": kv.shape[3],
        "ITEMS": items_apart(kv, shape.head_dim),
        "HEAD_ITEMS": head_items(kv),
        "FORMAT": format_of(kv),
    }


def items_apart(kv: Tensor, head_dim: int) -> int:
    """Distance between keys of one head in a block, in items. A packed cache has three planes."""
    return head_dim // PARTS.get(format_of(kv), 1)


def item_bytes(kv: Tensor) -> int:
    """Bytes of what kernels count offsets in: an element of the tensor, but a byte with four bits."""
    return 1 if is_four_bit(kv) else kv.dtype.itemsize


def item_strides(kv: Tensor) -> tuple[int, int]:
    """Distance from keys to values, and between blocks, in items."""
    items = kv.dtype.itemsize // item_bytes(kv)
    return kv.stride(0) * items, kv.stride(1) * items


def head_items(kv: Tensor) -> int:
    """Distance between heads in a block, in items."""
    items = kv.shape[4] * kv.dtype.itemsize // item_bytes(kv)
    return kv.shape[3] * (items - SCALE_WORDS if is_packed(kv) else items)


def precision(queries: Tensor) -> str:
    return "ieee" if queries.dtype == torch.float32 else "tf32"
