"""y = x W^T for few rows and a weight in planes of codes (`planes.py`).

As `ops/triton/grouped/few_rows.py`: each warp multiplies its own part of the inputs, straight from registers, and the
parts are added at the end. A code becomes scale * (code - offset) + minimum, rounded to the dtype of x, before it is
multiplied. More than 32 rows are several programs per tile of outputs, which start together and share what they read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from millrace.ops.triton.blocks.instructions import REGISTERS, numbers_code
from millrace.ops.triton.blocks.planes import BYTES, FLOAT, FP8, HALF, PAIR, POWER, SIGNED, SIX, PlanesWeight
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.grouped.few_rows import load_x
from millrace.ops.triton.grouped.instructions import MULTIPLY_BF16, MULTIPLY_F16, MULTIPLY_REGISTERS
from millrace.ops.triton.grouped.layout import INPUTS, OUTPUTS
from millrace.ops.triton.kernel_keys import settle_keys

MAX_ROWS = 64
ROWS_AT_ONCE = 32
_COLUMNS = 8
"""Rows of x that one matrix instruction takes."""
_DEEP, _WIDE = 8192, 16384
_HALF, _PAIR, _SIX, _BYTES = gl.constexpr(HALF), gl.constexpr(PAIR), gl.constexpr(SIX), gl.constexpr(BYTES)
_SIGNED, _POWER, _FLOAT, _FP8 = gl.constexpr(SIGNED), gl.constexpr(POWER), gl.constexpr(FLOAT), gl.constexpr(FP8)


@dataclass(frozen=True, slots=True)
class PlaneTiles:
    """Warps that share the inputs, and tiles of 64 inputs that a warp loads at a time: 2 or 4."""

    warps: int
    ahead: int


@gluon.jit
def _load_codes(ptr, block, blocks, at, AHEAD: gl.constexpr):
    words = ()
    for u in gl.static_range(AHEAD):
        words = words + (gl.load(ptr + (block + u) * 128 + at, mask=block + u < blocks, other=0),)
    return words


@gluon.jit
def _load_scales(ptr, factors_ptr, block, blocks, at, AHEAD: gl.constexpr, SCALES: gl.constexpr):
    """SIX and SIGNED: the words of 256 inputs. Others: one per block of 64 inputs, then what multiplies them."""
    item = at % 4
    g = at // 16
    inside = block < blocks
    pair = g * 2 + item % 2
    found = ()
    if SCALES == _SIX or SCALES == _SIGNED:  # noqa: SIM109 (no `in` in kernels)
        gl.static_assert(AHEAD == 4)
        WORDS: gl.constexpr = 4 if SCALES == _SIX else 2
        for w in gl.static_range(WORDS):
            found = found + (gl.load(ptr + (block // 4 * WORDS + w) * 16 + pair, mask=inside, other=0),)
    else:
        for u in gl.static_range(AHEAD):
            if SCALES == _BYTES or SCALES == _FP8:  # noqa: SIM109
                place = (block + u) * 64 + (at // 8) % 2 * 32 + g * 4 + item
            elif SCALES == _FLOAT:
                place = (block + u) * 16 + pair
            else:
                place = ((block + u) * 2 + item // 2) * 16 + pair
            found = found + (gl.load(ptr + place, mask=block + u < blocks, other=0),)
        if SCALES == _BYTES:
            found = found + (gl.load(factors_ptr + (block // 4) * 16 + pair, mask=inside, other=0),)
        elif SCALES == _FP8:
            found = found + (gl.load(factors_ptr + pair, mask=inside, other=0),)
    return found


@gluon.jit
def _half(bits):
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _whole(number):
    """A small number as float32, without the conversion, which is slow."""
    return (number | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def _record(
    scales, item, u: gl.constexpr, AHEAD: gl.constexpr, SCALES: gl.constexpr, OFFSET: gl.constexpr, HALF: gl.constexpr
):
    """The scale in the lower 16 bits; in the upper ones the value of the code OFFSET."""
    if SCALES == _HALF:
        scale = _half(scales[u])
    elif SCALES == _PAIR:
        scale = _half(scales[u] & 0xFFFF)
        least = _half(scales[u] >> 16) + scale * OFFSET
    elif SCALES == _SIX:
        if u < 3:
            fields = scales[1 + u]
        else:
            fields = ((scales[1] >> 24) & 0xFF) | (((scales[2] >> 24) & 0xFF) << 8) | (((scales[3] >> 24) & 0xFF) << 16)
        fields = (fields >> (item // 2 * 12)) & 0xFFF
        scale = _half(scales[0] & 0xFFFF) * _whole(fields & 63)
        least = scale * OFFSET - _half(scales[0] >> 16) * _whole(fields >> 6)
    elif SCALES == _BYTES:
        scale = _half(scales[AHEAD]) * (_whole(scales[u].to(gl.int32)) - 128.0)
    elif SCALES == _SIGNED:
        group = 2 * u + item // 2
        six = ((scales[1] >> (4 * group)) & 15) | (((scales[0] >> (16 + 2 * group)) & 3) << 4)
        scale = _half(scales[0] & 0xFFFF) * (_whole(six) - 32.0)
    elif SCALES == _POWER:
        # 2^-127 is not a normal float32; tiny weights become zero.
        scale = (scales[u].to(gl.int32) << 23).to(gl.float32, bitcast=True)
    elif SCALES == _FLOAT:
        scale = scales[u].to(gl.float32)
    else:
        bits = scales[u].to(gl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        scale = bits.to(gl.float32, bitcast=True) * 1.329227995784916e36 * scales[AHEAD]  # times 2^120
    if SCALES != _PAIR and SCALES != _SIX:
        least = scale * 0.0
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $2;" if HALF else "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [least, scale],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _spread(upper, UPPER: gl.constexpr):
    """Bits of e = 0 in the lower half of a register, of e = 1 in the upper half."""
    bits = upper.to(gl.int32)
    if UPPER == 1:
        return (bits & 0xF) | ((bits & 0xF0) << 12)
    elif UPPER == 2:
        return (bits & 0xFF) | ((bits & 0xFF00) << 8)
    else:
        return bits


@gluon.jit
def numbers_of(
    lower, upper, record, UPPER: gl.constexpr, NUMBERS: gl.constexpr, REGISTERS: gl.constexpr
):  # fmt: skip
    """The weight's operand of the matrix instruction."""
    if UPPER:
        return gl.inline_asm_elementwise(
            NUMBERS, REGISTERS, [lower, _spread(upper, UPPER), record], dtype=(gl.int32,) * 4, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            NUMBERS, REGISTERS, [lower, record], dtype=(gl.int32,) * 4, is_pure=True, pack=4
        )


@gluon.jit
def _add_products(
    lower, upper, scales, xs, sums, item, AHEAD: gl.constexpr, COLUMNS: gl.constexpr, SCALES: gl.constexpr,
    UPPER: gl.constexpr, OFFSET: gl.constexpr, NUMBERS: gl.constexpr, REGISTERS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    for u in gl.static_range(AHEAD):
        record = _record(scales, item, u, AHEAD, SCALES, OFFSET, HALF)
        a0, a1, a2, a3 = numbers_of(lower[u], upper[u], record, UPPER, NUMBERS, REGISTERS)
        more = ()
        for c in gl.static_range(COLUMNS):
            product = gl.inline_asm_elementwise(
                MULTIPLY_F16 if HALF else MULTIPLY_BF16, MULTIPLY_REGISTERS,
                [a0, a1, a2, a3, xs[(c * AHEAD + u) * 2], xs[(c * AHEAD + u) * 2 + 1], sums[c]],
                dtype=gl.float32, is_pure=True, pack=4,
            )  # fmt: skip
            more = more + (product,)
        sums = more
    return sums


@gluon.jit
def few_planes_kernel(
    x_ptr, lower_ptr, upper_ptr, scales_ptr, factors_ptr, bias_ptr, out_ptr, M, N, K, x_stride, row_blocks,
    per_tile, per_factor,
    WARPS: gl.constexpr, AHEAD: gl.constexpr, COLUMNS: gl.constexpr, SCALES: gl.constexpr, UPPER: gl.constexpr,
    OFFSET: gl.constexpr, NUMBERS: gl.constexpr, REGISTERS: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """out [M, N] = x W^T + bias. x is read as pairs of numbers, `x_stride` of them per row; a tile of outputs has
    `per_tile` places in `scales` and `per_factor` in `factors`. HALF: float16."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    item = at % 4
    g = at // 16
    t = (at // 4) % 4
    blocks = K // 64
    tile = gl.program_id(0) // row_blocks
    first = gl.program_id(0) % row_blocks * (COLUMNS * 8)
    lower_ptr += tile.to(gl.int64) * blocks * 128
    upper_ptr += tile.to(gl.int64) * blocks * 128
    scales_ptr += tile.to(gl.int64) * per_tile
    factors_ptr += tile.to(gl.int64) * per_factor
    own = at + warp * 0
    at_x = t * 4 + item + warp * 0
    row = first + g + warp * 0
    zero = gl.zeros([WARPS, 128], gl.float32, layout)
    sums = ()
    for _ in gl.static_range(COLUMNS):
        sums = sums + (zero,)
    block = warp * AHEAD + at * 0
    lower = _load_codes(lower_ptr, block, blocks, own, AHEAD)
    upper = _load_codes(upper_ptr, block, blocks, own, AHEAD) if UPPER else lower
    scales = _load_scales(scales_ptr, factors_ptr, block, blocks, own, AHEAD, SCALES)
    wait_for_previous_kernel(EARLY)
    xs = load_x(x_ptr, block, blocks, row, x_stride, M, at_x, AHEAD, COLUMNS)
    for _ in range((blocks + WARPS * AHEAD - 1) // (WARPS * AHEAD)):
        block += WARPS * AHEAD
        next_lower = _load_codes(lower_ptr, block, blocks, own, AHEAD)
        next_upper = _load_codes(upper_ptr, block, blocks, own, AHEAD) if UPPER else next_lower
        next_scales = _load_scales(scales_ptr, factors_ptr, block, blocks, own, AHEAD, SCALES)
        next_xs = load_x(x_ptr, block, blocks, row, x_stride, M, at_x, AHEAD, COLUMNS)
        sums = _add_products(
            lower, upper, scales, xs, sums, item, AHEAD, COLUMNS, SCALES, UPPER, OFFSET, NUMBERS, REGISTERS, HALF
        )
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
def dequantise_kernel(
    lower_ptr, upper_ptr, scales_ptr, factors_ptr, out_ptr, K, per_tile, per_factor,
    WARPS: gl.constexpr, SCALES: gl.constexpr, UPPER: gl.constexpr, OFFSET: gl.constexpr, NUMBERS: gl.constexpr,
    REGISTERS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """out [N, K], written as pairs of numbers. Each warp has 256 inputs of a tile of outputs."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    rows: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    own = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :] + warp * 0
    blocks = K // 64
    tile = gl.program_id(0).to(gl.int64)
    lower_ptr += tile * blocks * 128
    upper_ptr += tile * blocks * 128
    scales_ptr += tile * per_tile
    factors_ptr += tile * per_factor
    block = (gl.program_id(1) * WARPS + warp) * 4 + own * 0
    lower = _load_codes(lower_ptr, block, blocks, own, 4)
    upper = _load_codes(upper_ptr, block, blocks, own, 4) if UPPER else lower
    scales = _load_scales(scales_ptr, factors_ptr, block, blocks, own, 4, SCALES)
    n = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, rows)))[None, :, None]
    pair = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, rows)))[None, None, :]
    at_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, rows)))[:, None, None]
    first = (gl.program_id(1) * WARPS + at_warp) * 4
    for u in gl.static_range(4):
        record = _record(scales, own % 4, u, 4, SCALES, OFFSET, HALF)
        n0, n1, n2, n3 = numbers_of(lower[u], upper[u], record, UPPER, NUMBERS, REGISTERS)
        joined = gl.join(gl.join(n0, n1), gl.join(n2, n3))  # [..., r, h]
        joined = gl.permute(gl.reshape(joined, [WARPS, 8, 4, 2, 2, 2, 2]), (0, 5, 1, 3, 2, 4, 6))  # warp r g a t b h
        values = gl.convert_layout(gl.reshape(joined, [WARPS, 16, 32]), rows)
        places = (tile * 16 + n) * (K // 2) + (first + u) * 32 + pair
        gl.store(out_ptr + places, values, mask=(first + u < blocks) & (n < 16))


def _constants(weight: PlanesWeight) -> dict[str, object]:
    made, is_half = weight.kind, weight.dtype == torch.float16
    return {
        "SCALES": made.scales,
        "UPPER": made.upper,
        "OFFSET": made.offset,
        "NUMBERS": numbers_code(made, "f16" if is_half else "bf16"),
        "REGISTERS": REGISTERS[min(1, made.upper)],
        "HALF": is_half,
    }


def choose_tiles(rows: int, weight: PlanesWeight) -> PlaneTiles:
    """Measured with the sizes of an 8B model on an H200 (2026-11)."""
    is_deep, is_wide, kind = weight.inputs >= _DEEP, weight.outputs >= _WIDE, weight.kind
    if rows > 16:
        return PlaneTiles(warps=4 if is_deep and rows <= ROWS_AT_ONCE else 2, ahead=4)
    if is_deep:
        return PlaneTiles(warps=4 if kind.upper == 0 and rows > 4 else 8, ahead=2 if kind.upper == 2 else 4)
    if rows > 8:
        return PlaneTiles(warps=4 if kind.upper == 4 else 2, ahead=4)
    return PlaneTiles(warps=4, ahead=2 if kind.upper == 4 and is_wide else 4)


def multiply(
    x: Tensor, weight: PlanesWeight, tiles: PlaneTiles, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, K] in the weight's dtype -> [M, N]; M is at most MAX_ROWS."""
    rows = x.shape[0]
    out = torch.empty((rows, weight.outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    row_blocks = triton.cdiv(rows, ROWS_AT_ONCE)
    few_planes_kernel[(weight.outputs // OUTPUTS * row_blocks,)](
        x.view(torch.int32), *weight.operands, out if bias is None else bias, out,
        rows, weight.outputs, weight.inputs, (x.stride(0) if rows > 1 else weight.inputs) // 2, row_blocks,
        *weight.places_per_tile, WARPS=tiles.warps, AHEAD=tiles.ahead,
        COLUMNS=triton.cdiv(triton.cdiv(rows, row_blocks), _COLUMNS), **_constants(weight), HAS_BIAS=bias is not None,
        num_warps=tiles.warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def dequantise(weight: PlanesWeight) -> Tensor:
    """[N, K] in the weight's dtype."""
    out = torch.empty((weight.outputs, weight.inputs), dtype=weight.dtype, device=weight.lower.device)
    warps = 4
    grid = (weight.outputs // OUTPUTS, triton.cdiv(weight.inputs, 4 * INPUTS * warps))
    dequantise_kernel[grid](
        *weight.operands, out.view(torch.int32), weight.inputs, *weight.places_per_tile, WARPS=warps,
        **_constants(weight), num_warps=warps,
    )  # fmt: skip
    return out


settle_keys(globals())
