"""Shared code of the warp-specialised matrix products for many rows on Hopper.

Written in Gluon, Triton's lower level, because Triton does not specialise warps on this GPU. One warp of a program
loads tiles of both operands into a ring in shared memory, eight multiply them. The barrier `full` of a stage says that
its tiles have arrived, `empty` that it may be filled again.
"""

from __future__ import annotations

import functools
from typing import Any

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

MULTIPLYING_WARPS = 8
FETCHING_REGISTERS = 24

# Renamed in Triton versions after 3.6.
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """The barriers `full` and `empty` of every stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def stage_to_fill(full, empty, step, num_bytes, STAGES: gl.constexpr):
    """(stage for the step's tiles, once it is empty; the barrier on which `num_bytes` arrive)"""
    stage = step % STAGES
    arrived = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(arrived, num_bytes)
    return stage, arrived


@gluon.jit
def multiply_tile(
    xs, ws, full, empty, step, K,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(product of a row tile and a column tile over all K inputs, the step after its last)"""
    sums = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT))
    for k in range(0, K, BLOCK_K):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        sums = warpgroup_mma(xs.index(stage), ws.index(stage).permute((1, 0)), sums, is_async=True)
        # All but the newest product are done: the previous stage is free once every warp has arrived here.
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        block_barrier()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    done = warpgroup_mma_wait(0, deps=[sums])
    block_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return done, step


def describe(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(rows, columns))


@functools.cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
