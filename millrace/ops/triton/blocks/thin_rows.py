"""y = x W^T for few rows and a weight in planes of two or three bits (`thin_planes.py`), as `few_rows.py` does for
codes of at least four bits: each warp multiplies its own part of the inputs, straight from registers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from millrace.ops.triton.blocks.thin_instructions import REGISTERS, numbers_code
from millrace.ops.triton.blocks.thin_planes import ITEMS, ThinWeight
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.grouped.few_rows import load_x
from millrace.ops.triton.grouped.instructions import MULTIPLY_BF16, MULTIPLY_F16, MULTIPLY_REGISTERS
from millrace.ops.triton.grouped.layout import OUTPUTS
from millrace.ops.triton.kernel_keys import settle_keys

MAX_ROWS = 64
ROWS_AT_ONCE = 32
_AHEAD = gl.constexpr(4)
"""Tiles of 64 inputs that a warp loads at a time: a block of the format."""
_COLUMNS = 8
"""Rows of x that one matrix instruction takes."""
_DEEP = 8192


@gluon.jit
def _load_codes(ptr, block, blocks, at):
    fields = ()
    for u in gl.static_range(_AHEAD):
        fields = fields + (gl.load(ptr + (block + u) * 128 + at, mask=block + u < blocks, other=0),)
    return fields


@gluon.jit
def _load_scales(ptr, heads_ptr, block, blocks, at, UPPER: gl.constexpr):
    """Factors of 256 inputs, then the number that multiplies them."""
    item = at % 4
    g = at // 16
    half = (at // 8) % 2
    pair = g * 2 + item % 2
    inside = block < blocks
    found = ()
    if UPPER:
        for w in gl.static_range(3):
            place = (block // 4 * 3 + w) * 32 + half * 16 + pair
            found = found + (gl.load(ptr + place, mask=inside, other=0),)
    else:
        for u in gl.static_range(_AHEAD):
            place = (block + u) * 64 + half * 32 + g * 4 + item
            found = found + (gl.load(ptr + place, mask=inside, other=0),)
    return found + (gl.load(heads_ptr + block // 4 * 16 + pair, mask=inside, other=0),)


@gluon.jit
def _half(bits):
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _whole(number):
    """A small number as float32, without the conversion, which is slow."""
    return (number | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def _record(scales, item, u: gl.constexpr, UPPER: gl.constexpr, HALF: gl.constexpr):
    """The scale in the lower 16 bits; in the upper ones the value of the code in the middle."""
    if UPPER:
        if u < 3:
            fields = scales[u].to(gl.int32) & 0xFFF
        else:
            fields = (scales[0].to(gl.int32) >> 12) & 15
            fields = fields | (((scales[1].to(gl.int32) >> 12) & 15) << 4)
            fields = fields | (((scales[2].to(gl.int32) >> 12) & 15) << 8)
        scale = _half(scales[3]) * (_whole((fields >> (item // 2 * 6)) & 63) - 32.0)
        least = scale * 0.0
    else:
        both = scales[u].to(gl.int32)
        scale = _half(scales[4] & 0xFFFF) * _whole(both & 15)
        least = scale * 2.0 - _half(scales[4] >> 16) * _whole(both >> 4)
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $2;" if HALF else "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [least, scale],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _numbers(
    lower, upper, record, UPPER: gl.constexpr, NUMBERS: gl.constexpr, REGISTERS: gl.constexpr
):  # fmt: skip
    """The weight's operand of the matrix instruction."""
    bits = lower.to(gl.int32)
    bits = (bits & 0xFF) | ((bits & 0xFF00) << 8)
    if UPPER:
        third = upper.to(gl.int32)
        third = (third & 0xF) | ((third & 0xF0) << 12)
        return gl.inline_asm_elementwise(
            NUMBERS, REGISTERS, [bits, third, record], dtype=(gl.int32,) * 4, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            NUMBERS, REGISTERS, [bits, record], dtype=(gl.int32,) * 4, is_pure=True, pack=4
        )


@gluon.jit
def _add_products(
    lower, upper, scales, xs, sums, item, COLUMNS: gl.constexpr, UPPER: gl.constexpr, NUMBERS: gl.constexpr,
    REGISTERS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    for u in gl.static_range(_AHEAD):
        record = _record(scales, item, u, UPPER, HALF)
        a0, a1, a2, a3 = _numbers(lower[u], upper[u], record, UPPER, NUMBERS, REGISTERS)
        more = ()
        for c in gl.static_range(COLUMNS):
            product = gl.inline_asm_elementwise(
                MULTIPLY_F16 if HALF else MULTIPLY_BF16, MULTIPLY_REGISTERS,
                [a0, a1, a2, a3, xs[(c * _AHEAD + u) * 2], xs[(c * _AHEAD + u) * 2 + 1], sums[c]],
                dtype=gl.float32, is_pure=True, pack=4,
            )  # fmt: skip
            more = more + (product,)
        sums = more
    return sums


@gluon.jit
def _at_tile(lower_ptr, upper_ptr, scales_ptr, heads_ptr, tile, blocks, UPPER: gl.constexpr):
    """Where a tile of 16 outputs begins."""
    own = tile.to(gl.int64) * blocks
    scales_ptr += own * (24 if UPPER else 64)
    return lower_ptr + own * 128, upper_ptr + own * 128, scales_ptr, heads_ptr + own * 4


@gluon.jit
def thin_rows_kernel(
    x_ptr, lower_ptr, upper_ptr, scales_ptr, heads_ptr, bias_ptr, out_ptr, M, N, K, x_stride, row_blocks,
    WARPS: gl.constexpr, COLUMNS: gl.constexpr, UPPER: gl.constexpr, NUMBERS: gl.constexpr,
    REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """out [M, N] = x W^T + bias. x is read as pairs of numbers, `x_stride` of them per row. HALF: float16."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    item = at % 4
    g = at // 16
    blocks = K // 64
    tile = gl.program_id(0) // row_blocks
    first = gl.program_id(0) % row_blocks * (COLUMNS * 8)
    lower_ptr, upper_ptr, scales_ptr, heads_ptr = _at_tile(
        lower_ptr, upper_ptr, scales_ptr, heads_ptr, tile, blocks, UPPER
    )
    own = at + warp * 0
    at_x = (at // 4) % 4 * 4 + item + warp * 0
    row = first + g + warp * 0
    zero = gl.zeros([WARPS, 128], gl.float32, layout)
    sums = ()
    for _ in gl.static_range(COLUMNS):
        sums = sums + (zero,)
    block = warp * _AHEAD + at * 0
    lower = _load_codes(lower_ptr, block, blocks, own)
    upper = _load_codes(upper_ptr, block, blocks, own) if UPPER else lower
    scales = _load_scales(scales_ptr, heads_ptr, block, blocks, own, UPPER)
    wait_for_previous_kernel(EARLY)
    xs = load_x(x_ptr, block, blocks, row, x_stride, M, at_x, _AHEAD, COLUMNS)
    for _ in range((blocks + WARPS * _AHEAD - 1) // (WARPS * _AHEAD)):
        block += WARPS * _AHEAD
        next_lower = _load_codes(lower_ptr, block, blocks, own)
        next_upper = _load_codes(upper_ptr, block, blocks, own) if UPPER else next_lower
        next_scales = _load_scales(scales_ptr, heads_ptr, block, blocks, own, UPPER)
        next_xs = load_x(x_ptr, block, blocks, row, x_stride, M, at_x, _AHEAD, COLUMNS)
        sums = _add_products(lower, upper, scales, xs, sums, item, COLUMNS, UPPER, NUMBERS, REGISTERS, HALF)
        lower = next_lower
        upper = next_upper
        scales = next_scales
        xs = next_xs
    place = gl.arange(0, 128, gl.SliceLayout(0, layout))
    n = tile * 16 + place // 16 + 8 * ((place % 4) // 2)
    for c in gl.static_range(COLUMNS):
        done = gl.sum(sums[c], 0)
        m = first + c * 8 + (place // 4) % 4 * 2 + place % 2
        inside = (m < M) & (n < N)
        if HAS_BIAS:
            done += gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + m.to(gl.int64) * N + n, done.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def thin_values_kernel(
    lower_ptr, upper_ptr, scales_ptr, heads_ptr, out_ptr, K,
    WARPS: gl.constexpr, UPPER: gl.constexpr, NUMBERS: gl.constexpr, REGISTERS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """out [N, K], written as pairs of numbers. Each warp has 256 inputs of a tile of outputs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    rows: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    own = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :] + warp * 0
    blocks = K // 64
    tile = gl.program_id(0).to(gl.int64)
    lower_ptr, upper_ptr, scales_ptr, heads_ptr = _at_tile(
        lower_ptr, upper_ptr, scales_ptr, heads_ptr, tile, blocks, UPPER
    )
    block = (gl.program_id(1) * WARPS + warp) * _AHEAD + own * 0
    lower = _load_codes(lower_ptr, block, blocks, own)
    upper = _load_codes(upper_ptr, block, blocks, own) if UPPER else lower
    scales = _load_scales(scales_ptr, heads_ptr, block, blocks, own, UPPER)
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, rows)))[None, :, None]
    pair = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, rows)))[None, None, :]
    at_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, rows)))[:, None, None]
    first = (gl.program_id(1) * WARPS + at_warp) * _AHEAD
    for u in gl.static_range(_AHEAD):
        record = _record(scales, own % 4, u, UPPER, HALF)
        n0, n1, n2, n3 = _numbers(lower[u], upper[u], record, UPPER, NUMBERS, REGISTERS)
        joined = gl.join(gl.join(n0, n1), gl.join(n2, n3))  # [..., r, h]
        joined = gl.permute(gl.reshape(joined, [WARPS, 8, 4, 2, 2, 2, 2]), (0, 5, 1, 3, 2, 4, 6))  # warp r g a t b h
        values = gl.convert_layout(gl.reshape(joined, [WARPS, 16, 32]), rows)
        places = (tile * 16 + n) * (K // 2) + (first + u) * 32 + pair
        gl.store(out_ptr + places, values, mask=(first + u < blocks) & (n < 16))


def _constants(weight: ThinWeight) -> dict[str, object]:
    is_half = weight.dtype == torch.float16
    return {
        "UPPER": weight.has_upper,
        "NUMBERS": numbers_code(weight.has_upper, is_half),
        "REGISTERS": REGISTERS[weight.has_upper],
        "HALF": is_half,
    }


def choose_warps(rows: int, weight: ThinWeight) -> int:
    """Warps that share the inputs; those that Q4_K takes."""
    is_deep = weight.inputs >= _DEEP
    if rows > 16:
        return 4 if is_deep and rows <= ROWS_AT_ONCE else 2
    if is_deep:
        return 4 if rows > 4 else 8
    return 2 if rows > 8 else 4


def multiply(
    x: Tensor, weight: ThinWeight, warps: int, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, K] in the weight's dtype -> [M, N]; M is at most MAX_ROWS."""
    rows = x.shape[0]
    out = torch.empty((rows, weight.outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    row_blocks = triton.cdiv(rows, ROWS_AT_ONCE)
    thin_rows_kernel[(weight.outputs // OUTPUTS * row_blocks,)](
        x.view(torch.int32), *weight.operands, out if bias is None else bias, out,
        rows, weight.outputs, weight.inputs, (x.stride(0) if rows > 1 else weight.inputs) // 2, row_blocks,
        WARPS=warps, COLUMNS=triton.cdiv(triton.cdiv(rows, row_blocks), _COLUMNS), **_constants(weight),
        HAS_BIAS=bias is not None, num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def dequantise(weight: ThinWeight) -> Tensor:
    """[N, K] in the weight's dtype."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=weight.dtype, device=weight.lower.device)
    warps = 4
    grid = (weight.outputs // OUTPUTS, triton.cdiv(weight.inputs, ITEMS * warps))
    thin_values_kernel[grid](
        *weight.operands, out.view(torch.int32), weight.inputs, WARPS=warps, **_constants(weight), num_warps=warps
    )
    return out


settle_keys(globals())
