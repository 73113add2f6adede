"""y = x W^T for up to 32 rows and a weight of packed 4-bit codes.

With few rows the time goes into reading codes. Each warp of a program multiplies its own part of the inputs, straight
from registers, with the matrix instruction that every Nvidia GPU has since compute capability 8.0; the parts are added
at the end. The next codes are loaded while the ones before are multiplied, the first before the previous kernel has
ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.grouped.instructions import (
    MULTIPLY_BF16,
    MULTIPLY_F16,
    MULTIPLY_REGISTERS,
    UNPACK_BF16,
    UNPACK_F16,
    UNPACK_REGISTERS,
    UNPACK_UNSCALED_BF16,
    UNPACK_UNSCALED_F16,
)
from millrace.ops.triton.grouped.layout import INPUTS, OUTPUTS, PackedCodes
from millrace.ops.triton.kernel_keys import settle_keys

MAX_ROWS = 32
_COLUMNS = 8
"""Rows of x that one matrix instruction takes."""


@dataclass(frozen=True, slots=True)
class FewTiles:
    """How a product is cut: warps that share the inputs, tiles of 64 inputs that a warp loads at a time, and tiles of
    16 outputs per program."""

    warps: int
    ahead: int
    tiles: int


@gluon.jit
def _load_weight(
    words_ptr, records_ptr, block, blocks, per_tile, records_per_tile, at_word, at_record, group_shift,
    AHEAD: gl.constexpr, TILES: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Words and records of AHEAD blocks of 64 inputs, for TILES tiles of outputs. Blocks past the end have zeros."""
    words = ()
    records = ()
    for tile in gl.static_range(TILES):
        for u in gl.static_range(AHEAD):
            inside = block + u < blocks
            words = words + (gl.load(words_ptr + tile * per_tile + (block + u) * 128 + at_word, mask=inside, other=0),)
            if u % SHARED == 0:
                group = ((block + u) * 64 >> group_shift) * 16
                records = records + (
                    gl.load(records_ptr + tile * records_per_tile + group + at_record, mask=inside, other=0),
                )
    return words, records


@gluon.jit
def load_x(x_ptr, block, blocks, row, x_stride, M, at_x, AHEAD: gl.constexpr, COLUMNS: gl.constexpr):
    xs = ()
    for c in gl.static_range(COLUMNS):
        for u in gl.static_range(AHEAD):
            inside = (block + u < blocks) & (row + c * 8 < M)
            pointers = x_ptr + (row + c * 8).to(gl.int64) * x_stride + (block + u) * 32 + at_x
            xs = xs + (gl.load(pointers, mask=inside, other=0), gl.load(pointers + 16, mask=inside, other=0))
    return xs


@gluon.jit
def _numbers(words, records, SCALED: gl.constexpr, HALF: gl.constexpr):
    """The weight's operand of the matrix instruction. SCALED: its values, otherwise code - zero."""
    if SCALED:
        return gl.inline_asm_elementwise(
            UNPACK_F16 if HALF else UNPACK_BF16, UNPACK_REGISTERS, [words, records], dtype=(gl.int32,) * 4,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            UNPACK_UNSCALED_F16 if HALF else UNPACK_UNSCALED_BF16, UNPACK_REGISTERS, [words, records],
            dtype=(gl.int32,) * 4, is_pure=True, pack=4,
        )  # fmt: skip


@gluon.jit
def _scales(records, HALF: gl.constexpr):
    if HALF:
        return (records & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        return (records << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _add_products(
    words, records, xs, sums, zero, first: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr,
    COLUMNS: gl.constexpr, SCALED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """The sums of one tile of outputs, plus the products of AHEAD blocks. `first`: its first words."""
    for p in gl.static_range(AHEAD // SHARED):
        record = records[first // SHARED + p]
        products = sums
        if not SCALED:
            products = ()
            for _ in gl.static_range(COLUMNS):
                products = products + (zero,)
        for q in gl.static_range(SHARED):
            a0, a1, a2, a3 = _numbers(words[first + p * SHARED + q], record, SCALED, HALF)
            more = ()
            for c in gl.static_range(COLUMNS):
                product = gl.inline_asm_elementwise(
                    MULTIPLY_F16 if HALF else MULTIPLY_BF16, MULTIPLY_REGISTERS,
                    [
                        a0, a1, a2, a3, xs[(c * AHEAD + p * SHARED + q) * 2], xs[(c * AHEAD + p * SHARED + q) * 2 + 1],
                        products[c],
                    ],
                    dtype=gl.float32, is_pure=True, pack=4,
                )  # fmt: skip
                more = more + (product,)
            products = more
        if not SCALED:
            scale = _scales(record, HALF)
            more = ()
            for c in gl.static_range(COLUMNS):
                more = more + (sums[c] + products[c] * scale,)
            products = more
        sums = products
    return sums


@gluon.jit
def few_rows_kernel(
    x_ptr, words_ptr, records_ptr, bias_ptr, out_ptr, M, N, K, x_stride, groups, group_shift,
    WARPS: gl.constexpr, AHEAD: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, SHARED: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """out [M, N] = x W^T + bias. x is read as pairs of numbers, `x_stride` of them per row. A group has
    1 << group_shift inputs, SHARED blocks of 64 have the same records. SCALED: two groups per block of 64 inputs, so
    numbers are scaled before the product; otherwise the products are. HALF: float16."""
    # One row of the tensors per warp; a thread has four consecutive items, one per word.
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    item = at % 4
    g = at // 16
    t = (at // 4) % 4
    blocks = K // 64
    tile = gl.program_id(0) * TILES
    words_ptr += tile.to(gl.int64) * blocks * 128
    records_ptr += tile.to(gl.int64) * groups * 16
    per_tile, records_per_tile = blocks * 128, groups * 16
    at_word = at + warp * 0
    if SCALED:
        at_record = g * 2 + item % 2 + (item // 2) * 16 + warp * 0
    else:
        at_record = g * 2 + item // 2 + warp * 0
    at_x = t * 4 + item + warp * 0
    row = g + warp * 0
    zero = gl.zeros([WARPS, 128], gl.float32, layout)
    sums = ()
    for _ in gl.static_range(TILES * COLUMNS):
        sums = sums + (zero,)
    block = warp * AHEAD + at * 0
    words, records = _load_weight(
        words_ptr, records_ptr, block, blocks, per_tile, records_per_tile, at_word, at_record, group_shift,
        AHEAD, TILES, SHARED,
    )  # fmt: skip
    wait_for_previous_kernel(EARLY)
    xs = load_x(x_ptr, block, blocks, row, x_stride, M, at_x, AHEAD, COLUMNS)
    for _ in range((blocks + WARPS * AHEAD - 1) // (WARPS * AHEAD)):
        block += WARPS * AHEAD
        next_words, next_records = _load_weight(
            words_ptr, records_ptr, block, blocks, per_tile, records_per_tile, at_word, at_record, group_shift,
            AHEAD, TILES, SHARED,
        )  # fmt: skip
        next_xs = load_x(x_ptr, block, blocks, row, x_stride, M, at_x, AHEAD, COLUMNS)
        added = ()
        for i in gl.static_range(TILES):
            mine = ()
            for c in gl.static_range(COLUMNS):
                mine = mine + (sums[i * COLUMNS + c],)
            added = added + _add_products(
                words, records, xs, mine, zero, i * AHEAD, AHEAD, SHARED, COLUMNS, SCALED, HALF
            )
        sums = added
        words = next_words
        records = next_records
        xs = next_xs
    place = gl.arange(0, 128, gl.SliceLayout(0, layout))
    for i in gl.static_range(TILES):
        n = (tile + i) * 16 + place // 16 + 8 * ((place % 4) // 2)
        for c in gl.static_range(COLUMNS):
            done = gl.sum(sums[i * COLUMNS + c], 0)
            m = c * 8 + (place // 4) % 4 * 2 + place % 2
            inside = (m < M) & (n < N)
            if HAS_BIAS:
                done += gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)
            gl.store(out_ptr + m.to(gl.int64) * N + n, done.to(out_ptr.dtype.element_ty), mask=inside)


def multiply(
    x: Tensor, weight: PackedCodes, tiles: FewTiles, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, K] -> [M, N], M at most MAX_ROWS; the weight has a whole number of `tiles.tiles` tiles of outputs."""
    rows = x.shape[0]
    assert weight.outputs // OUTPUTS % tiles.tiles == 0
    assert tiles.ahead % 2 == 0
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows, weight.outputs), dtype=out_dtype or x.dtype, device=x.device)
    few_rows_kernel[(weight.outputs // OUTPUTS // tiles.tiles,)](
        x.view(torch.int32), weight.words, weight.records, out if bias is None else bias, out,
        rows, weight.outputs, weight.inputs, (x.stride(0) if rows > 1 else weight.inputs) // 2,
        weight.records.shape[1], weight.group_shift,
        WARPS=tiles.warps, AHEAD=tiles.ahead, TILES=tiles.tiles, COLUMNS=triton.cdiv(rows, _COLUMNS),
        SHARED=weight.blocks_per_record, SCALED=weight.group < INPUTS, HAS_BIAS=bias is not None,
        HALF=x.dtype == torch.float16, num_warps=tiles.warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


settle_keys(globals())
