"""y = x W^T for more than a few rows and a weight of packed 4-bit codes, on Hopper.

The weight is the left operand: its codes become registers of the warpgroup's matrix instruction without passing through
shared memory. One warp loads tiles of x and words into a ring (see `gemm/operand_ring.py`), the others unpack and
multiply. With split sums, each part goes to a float32 workspace and the last program to arrive adds them in a fixed
order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from millrace.ops.triton.gemm.operand_ring import (
    FETCHING_REGISTERS,
    block_barrier,
    describe,
    load_tile,
    make_barriers,
    stage_to_fill,
)
from millrace.ops.triton.grouped.instructions import (
    UNPACK_IN_ORDER_BF16,
    UNPACK_IN_ORDER_F16,
    UNPACK_IN_ORDER_REGISTERS,
)
from millrace.ops.triton.grouped.layout import INPUTS, OUTPUTS, WORDS, PackedCodes
from millrace.ops.triton.kernel_keys import settle_keys

BLOCK_PAIR = 2 * INPUTS


@dataclass(frozen=True, slots=True)
class ManyTiles:
    """Rows and outputs of a program's tile, 64 outputs or, without split sums, 128; stages of the ring, parts of the
    sums."""

    rows: int
    outputs: int
    stages: int
    split: int = 1

    def count(self, rows: int, outputs: int) -> int:
        return -(-rows // self.rows) * -(-outputs // self.outputs)


@gluon.jit
def _fetch(
    x_desc, words_desc, xs, ws, full, empty, m, tile, k_begin, k_end,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for step in range((k_end - k_begin) // 64):
        k = k_begin + step * 64
        stage, arrived = stage_to_fill(full, empty, step, ROWS * 128 + COLUMNS * 32, STAGES)
        load_tile(words_desc, [tile, k * 2], arrived, ws.index(stage))
        load_tile(x_desc, [m, k], arrived, xs.index(stage))


@gluon.jit
def _operand(words, records, t, COLUMNS: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's numbers [COLUMNS, 64], in the registers where the matrix instruction wants them."""
    if HALF:
        n0, n1, n2, n3, n4, n5, n6, n7 = gl.inline_asm_elementwise(
            UNPACK_IN_ORDER_F16, UNPACK_IN_ORDER_REGISTERS, [words, records, t], dtype=(gl.float16,) * 8,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        n0, n1, n2, n3, n4, n5, n6, n7 = gl.inline_asm_elementwise(
            UNPACK_IN_ORDER_BF16, UNPACK_IN_ORDER_REGISTERS, [words, records, t], dtype=(gl.bfloat16,) * 8,
            is_pure=True, pack=4,
        )  # fmt: skip
    # Joined dimensions: r (output g + 8 r), h (8 inputs later), b (16 inputs later). The last one of each tensor is
    # (32 inputs later, the second of two neighbours).
    lower = gl.join(gl.join(n0, n1), gl.join(n2, n3))
    upper = gl.join(gl.join(n4, n5), gl.join(n6, n7))
    joined = gl.reshape(gl.join(lower, upper), [COLUMNS // 16, 8, 4, 2, 2, 2, 2, 2])  # tile g t a e r h b
    ordered = gl.permute(joined, (0, 5, 1, 3, 7, 6, 2, 4))  # tile r g a b h t e
    return gl.convert_layout(gl.reshape(ordered, [COLUMNS, 64]), LAYOUT)


@gluon.jit
def _store(done, bias_ptr, out_ptr, row, n, M, N, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        done += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    gl.store(out_ptr + row.to(gl.int64) * N + n, done.to(out_ptr.dtype.element_ty), mask=(row < M) & (n < N))


@gluon.jit
def _multiply(
    xs, ws, records_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, full, empty, m, tile, part, k_begin, k_end,
    M, N, groups, group_shift, half_step, split, index,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HALF: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    words_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    at = gl.arange(0, 128, gl.SliceLayout(0, words_layout))[None, :]
    item = at % 4
    own = gl.arange(0, COLUMNS // 16, gl.SliceLayout(1, words_layout))[:, None] + tile
    own = gl.minimum(own, N // 16 - 1)  # past the end: any record, the words are zeros and nothing is stored
    records_ptr += own.to(gl.int64) * groups * 16 + (at // 16) * 2 + item % 2 + (item // 2) * half_step
    sums = warpgroup_mma_init(gl.zeros((COLUMNS, ROWS), gl.float32, layout))
    step = 0
    t = (at // 4) % 4 + own * 0
    even = gl.load(records_ptr + (k_begin >> group_shift) * 16)
    odd = even if SHARED == 2 else gl.load(records_ptr + ((k_begin + 64) >> group_shift) * 16)
    # Two blocks at a time: the numbers of one stay in their registers while the other's are unpacked.
    for k in range(k_begin, k_end, 128):
        following = gl.minimum(k + 128, k_end - 128)
        next_even = gl.load(records_ptr + (following >> group_shift) * 16)
        next_odd = next_even if SHARED == 2 else gl.load(records_ptr + ((following + 64) >> group_shift) * 16)
        for block in gl.static_range(2):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            records = even if block == 0 else odd
            operand = _operand(ws.index(stage).load(words_layout), records, t, COLUMNS, HALF, left)
            sums = warpgroup_mma(operand, xs.index(stage).permute((1, 0)), sums, is_async=True)
            # All but the newest product are done: the previous stage is free once every warp has arrived here.
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
            block_barrier()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
            step += 1
        even, odd = next_even, next_odd
    done = warpgroup_mma_wait(0, deps=[sums])
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
    if SPLIT:
        parts = partial_ptr + index.to(gl.int64) * split * (ROWS * COLUMNS) + n * ROWS + row
        gl.store(parts + part * (ROWS * COLUMNS), done)
        block_barrier()  # all have stored before one counts; its release makes the stores visible
        if gl.atomic_add(counter_ptr + index, 1, sem="acq_rel") == split - 1:
            gl.store(counter_ptr + index, 0)
            total = gl.zeros((COLUMNS, ROWS), gl.float32, layout)
            for other in range(split):
                total += gl.load(parts + other * (ROWS * COLUMNS), cache_modifier=".cg")
            _store(total, bias_ptr, out_ptr, m + row, tile * 16 + n, M, N, HAS_BIAS)
    else:
        _store(done, bias_ptr, out_ptr, m + row, tile * 16 + n, M, N, HAS_BIAS)


@gluon.jit
def many_rows_kernel(
    x_desc, words_desc, records_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    M, N, K, groups, group_shift, half_step, tiles_m, split,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, HALF: gl.constexpr,
    SPLIT: gl.constexpr, SHARED: gl.constexpr, FETCHING_REGISTERS: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    xs = gl.allocate_shared_memory(kind, [STAGES, ROWS, 64], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, COLUMNS // 16, 128], words_desc.layout)
    full, empty = make_barriers(STAGES)
    WARPS: gl.constexpr = gl.num_warps()
    pid = gl.program_id(0)
    m = pid % tiles_m * ROWS
    part = pid // tiles_m % split
    tile = pid // (tiles_m * split)
    length = (K // 128 + split - 1) // split * 128
    k_begin = part * length
    k_end = gl.minimum(k_begin + length, K)
    index = tile * tiles_m + pid % tiles_m
    tile *= COLUMNS // 16
    gl.warp_specialize(
        [
            (_multiply, (
                xs, ws, records_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, full, empty, m, tile, part, k_begin,
                k_end, M, N, groups, group_shift, half_step, split, index,
                ROWS, COLUMNS, STAGES, WARPS, HAS_BIAS, HALF, SPLIT, SHARED,
            )),
            (_fetch, (x_desc, words_desc, xs, ws, full, empty, m, tile, k_begin, k_end, ROWS, COLUMNS, STAGES)),
        ],
        [1],
        [FETCHING_REGISTERS],
    )  # fmt: skip


@functools.cache
def _words_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def multiply(
    x: Tensor,
    weight: PackedCodes,
    tiles: ManyTiles,
    counters: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, K] -> [M, N], K a multiple of 128. `counters`: zeros, at least `tiles.count(M, N)`, zero again afterwards."""
    rows, outputs, split = x.shape[0], weight.outputs, tiles.split
    assert weight.inputs % BLOCK_PAIR == 0
    assert split == 1 or tiles.outputs == 64
    if x.stride(1) != 1 or x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    count = tiles.count(rows, outputs)
    size = count * split * tiles.rows * tiles.outputs
    partial = torch.empty(size, dtype=torch.float32, device=x.device) if split > 1 else out
    words = TensorDescriptor.from_tensor(weight.words, [tiles.outputs // OUTPUTS, WORDS], _words_layout())
    many_rows_kernel[(count * split,)](
        describe(x, tiles.rows, INPUTS), words, weight.records, out if bias is None else bias, out, partial, counters,
        rows, outputs, weight.inputs, weight.records.shape[1], weight.group_shift, weight.half_step,
        triton.cdiv(rows, tiles.rows), split,
        ROWS=tiles.rows, COLUMNS=tiles.outputs, STAGES=tiles.stages, HAS_BIAS=bias is not None,
        HALF=x.dtype == torch.float16, SPLIT=split > 1, SHARED=weight.blocks_per_record,
        FETCHING_REGISTERS=FETCHING_REGISTERS, num_warps=tiles.outputs // 16,
    )  # fmt: skip
    return out


settle_keys(globals())
