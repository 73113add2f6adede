"""The first half of a gated MLP for many rows in one kernel: act(x Wg^T) · (x Wu^T), with Wg above Wu in one weight.

As two kernels, cuBLASLt's product and the activation, gates and ups are written to memory and read again: 5% of the
time and of the power that limits such a product. This is a persistent kernel: each program walks through output tiles
with its operands in a ring (`operand_ring.py`). Gates and ups are two halves of one right operand, so each thread ends
up with both numbers of a pair and computes the activation alone, while the ring fills with the next tile's operands.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from millrace.ops.triton.gemm.operand_ring import (
    FETCHING_REGISTERS,
    MULTIPLYING_WARPS,
    block_barrier,
    describe,
    load_tile,
    make_barriers,
    multiply_tile,
    stage_to_fill,
    store_tile,
)
from millrace.ops.tuning.load import num_multiprocessors

STAGES, BLOCK_K = 4, 64
"""Stages of the ring, and inputs per stage."""
GROUP = 16
"""Row tiles processed together, so that the weights they share are still in L2."""


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: down through GROUP tile rows, then the next column."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    inside = tile % in_group
    return first + inside % height, inside // height


@gluon.jit
def _fetch(
    x_desc, w_desc, xs, ws, full, empty, tiles_m, tiles_n, K, up_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        for k in range(0, K, BLOCK_K):
            stage, arrived = stage_to_fill(full, empty, step, (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * 2, STAGES)
            weights = ws.index(stage)
            load_tile(x_desc, [m * BLOCK_M, k], arrived, xs.index(stage))
            load_tile(w_desc, [n * BLOCK_N, k], arrived, weights.slice(0, BLOCK_N))
            up = n * BLOCK_N + up_offset
            load_tile(w_desc, [up, k], arrived, weights.slice(BLOCK_N, BLOCK_N))
            step += 1


@gluon.jit
def _activate(x, GELU: gl.constexpr):
    """x times a sigmoid, with the approximate reciprocal: its error is far below bfloat16's."""
    scaled = x
    if GELU:
        scaled = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + gl.exp(-scaled)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _multiply(
    out_desc, xs, ws, full, empty, staging, tiles_m, tiles_n, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GELU: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 2 * BLOCK_N, 16]
    )
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        done, step = multiply_tile(xs, ws, full, empty, step, K, BLOCK_M, 2 * BLOCK_N, BLOCK_K, STAGES, layout)
        gates, ups = done.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        result = (_activate(gates, GELU) * ups).to(gl.bfloat16)
        tma.store_wait(0)
        block_barrier()
        staging.store(result)
        fence_async_shared()
        block_barrier()
        store_tile(out_desc, [m * BLOCK_M, n * BLOCK_N], staging)
    tma.store_wait(0)


@gluon.jit
def gated_many_kernel(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, K, up_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    GELU: gl.constexpr, FETCHING_REGISTERS: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * BLOCK_N, BLOCK_K], w_desc.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], out_desc.layout)
    full, empty = make_barriers(STAGES)
    WARPS: gl.constexpr = gl.num_warps()
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, xs, ws, full, empty, staging, tiles_m, tiles_n, K,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, GELU, WARPS,
            )),
            (_fetch, (
                x_desc, w_desc, xs, ws, full, empty, tiles_m, tiles_n, K, up_offset,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP,
            )),
        ],
        [1],
        [FETCHING_REGISTERS],
    )  # fmt: skip


def gated_many(x: Tensor, weight: Tensor, activation: str, tile: tuple[int, int]) -> Tensor:
    """[T, K] and [2 N, K], gates above ups, both bfloat16 -> [T, N]. K and N are multiples of 8, and the activation is
    silu or gelu_tanh. `tile`: (rows, outputs), 128 × 128 or 256 × 64: what fits a multiprocessor."""
    tile_rows, tile_outputs = tile
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    tiles_m, tiles_n = triton.cdiv(rows, tile_rows), triton.cdiv(outputs, tile_outputs)
    gated_many_kernel[(min(num_multiprocessors(x.device), tiles_m * tiles_n),)](
        describe(x, tile_rows, BLOCK_K),
        describe(weight, tile_outputs, BLOCK_K),
        describe(out, tile_rows, tile_outputs),
        tiles_m,
        tiles_n,
        inputs,
        outputs,
        BLOCK_M=tile_rows,
        BLOCK_N=tile_outputs,
        BLOCK_K=BLOCK_K,
        STAGES=STAGES,
        GROUP=GROUP,
        GELU=activation == "gelu_tanh",
        FETCHING_REGISTERS=FETCHING_REGISTERS,
        num_warps=MULTIPLYING_WARPS,
    )
    return out
