"""The first half of a gated MLP for many rows in one kernel: act(x Wg^T) · (x Wu^T), with Wg above Wu in one weight.

In two, by the library's product and the activation's kernel, gates and ups are written to memory and read again: a
twentieth of the time, and of the power that binds such a product. Here each program goes through output tiles, and its
warps have two roles. One fetches tiles of x and of both weights into a ring in shared memory. Eight multiply: gates and
ups are two halves of one right operand, so that a thread ends with both numbers of each pair, and the activation needs
nobody else's. While they compute it, the ring fills with the next tile's operands.

Written in Gluon, Triton's lower level, since Triton itself gives no role to single warps on this chip.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

STAGES, BLOCK_K = 4, 64
"""Tiles in the ring, and inputs in each."""
GROUP = 16
"""Tiles of rows that are taken together, so that what they share is still in the L2 cache."""
MULTIPLYING_WARPS = 8
FETCHING_REGISTERS = 24

# What later versions of Triton than 3.6 call otherwise.
all_warps_here = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: down through GROUP rows of tiles, then to the next column."""
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
            stage = step % STAGES
            arrived, weights = full.index(stage), ws.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(arrived, (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * 2)
            load_tile(x_desc, [m * BLOCK_M, k], arrived, xs.index(stage))
            load_tile(w_desc, [n * BLOCK_N, k], arrived, weights.slice(0, BLOCK_N))
            up = n * BLOCK_N + up_offset
            load_tile(w_desc, [up, k], arrived, weights.slice(BLOCK_N, BLOCK_N))
            step += 1


@gluon.jit
def _activate(x, GELU: gl.constexpr):
    """x times a sigmoid, with the quick reciprocal: its error is far below that of bfloat16."""
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
        sums = warpgroup_mma_init(gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, layout))
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            sums = warpgroup_mma(xs.index(stage), ws.index(stage).permute((1, 0)), sums, is_async=True)
            # All but the newest product are done: the stage before this one is free once every warp is here.
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
            all_warps_here()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        done = warpgroup_mma_wait(0, deps=[sums])
        all_warps_here()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        gates, ups = done.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        result = (_activate(gates, GELU) * ups).to(gl.bfloat16)
        tma.store_wait(0)
        all_warps_here()
        staging.store(result)
        fence_async_shared()
        all_warps_here()
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
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
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
    silu or gelu_tanh. `tile`: rows and outputs, 128 × 128 or 256 × 64, which is what a multiprocessor can hold."""
    tile_rows, tile_outputs = tile
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    tiles_m, tiles_n = triton.cdiv(rows, tile_rows), triton.cdiv(outputs, tile_outputs)
    gated_many_kernel[(min(multiprocessors(x.device), tiles_m * tiles_n),)](
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


def describe(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(rows, columns))


@functools.cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
