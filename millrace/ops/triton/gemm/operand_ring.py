"""Products of many rows on Hopper, written in Gluon, Triton's lower level, since Triton itself gives no role to single
warps on this chip: what such kernels have in common.

A program's warps have two roles. One fetches tiles of both operands into a ring in shared memory, eight multiply them.
That one tells by `full` that a stage has arrived, those that multiply by `empty` that it may be filled anew.
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

# What later versions of Triton than 3.6 call otherwise.
all_warps_here = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """`full` and `empty`, one of each for every stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def stage_to_fill(full, empty, step, num_bytes, STAGES: gl.constexpr):
    """The stage that the step's tiles go to, once it is empty, and the barrier at which so many bytes arrive."""
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
    """The product of a tile of rows and one of columns over all K inputs, and the step that comes after its last."""
    sums = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT))
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
    return done, step


def describe(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(rows, columns))


@functools.cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
