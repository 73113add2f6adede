"""The LM head's product and the greatest logit of each row in one kernel: logits are never written to memory.

With cuBLASLt and a separate argmax kernel, 256 rows of 151,936 float32 logits would be 155 MB written and read again.
In this persistent kernel a program keeps one tile of rows and walks through tiles of the vocabulary, its operands in a
ring (`operand_ring.py`). Tokens lie along the side of the matrix instruction whose results are in few threads: each
thread finds its own maximum, and a row's state is one logit and one token. A second, small kernel picks among the
programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from millrace.ops.base.greedy_head import DrawnTokens
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from millrace.ops.triton.gemm.choice import HEAD_INPUTS
from millrace.ops.triton.gemm.operand_ring import (
    FETCHING_REGISTERS,
    MULTIPLYING_WARPS,
    describe,
    load_tile,
    make_barriers,
    multiply_tile,
    stage_to_fill,
)
from millrace.ops.tuning.load import num_multiprocessors


@dataclass(frozen=True, slots=True)
class HeadTile:
    """Rows and tokens of a tile, and stages of the operand ring."""

    rows: int
    tokens: int
    stages: int


@gluon.jit
def _fetch(
    x_desc, w_desc, xs, ws, full, empty, tiles_m, tiles_n, K,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    m = gl.program_id(0) % tiles_m * ROWS
    step = 0
    for n in range(gl.program_id(0) // tiles_m, tiles_n, gl.num_programs(0) // tiles_m):
        for k in range(0, K, BLOCK_K):
            stage, arrived = stage_to_fill(full, empty, step, (ROWS + TOKENS) * BLOCK_K * 2, STAGES)
            load_tile(w_desc, [n * TOKENS, k], arrived, ws.index(stage))
            load_tile(x_desc, [m, k], arrived, xs.index(stage))
            step += 1


@gluon.jit
def _multiply(
    best_ptr, token_ptr, xs, ws, full, empty, tiles_m, tiles_n, K, vocab,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    DOWN: gl.constexpr = ROWS // 16 if ROWS // 16 < WARPS else WARPS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[DOWN, WARPS // DOWN], instr_shape=[16, TOKENS * DOWN // WARPS, 16]
    )
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    best = gl.full([ROWS], float("-inf"), gl.float32, of_row)
    token = gl.full([ROWS], 0, gl.int32, of_row)
    step = 0
    for n in range(gl.program_id(0) // tiles_m, tiles_n, gl.num_programs(0) // tiles_m):
        done, step = multiply_tile(xs, ws, full, empty, step, K, ROWS, TOKENS, BLOCK_K, STAGES, layout)
        # The first among equals; NaN is less than any number.
        at = n * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
        logits = gl.where((at < vocab)[None, :] & (done == done), done, float("-inf"))
        top = gl.max(logits, 1)
        first = gl.min(gl.where(logits == top[:, None], at[None, :], 0x7FFFFFFF), 1)
        token = gl.where(top > best, first, token)
        best = gl.maximum(best, top)
    # [programs of a tile of rows, all rows]
    at = gl.program_id(0) * ROWS + gl.arange(0, ROWS, of_row)
    gl.store(best_ptr + at, best)
    gl.store(token_ptr + at, token)


@gluon.jit
def greedy_head_kernel(
    x_desc, w_desc, best_ptr, token_ptr, tiles_m, tiles_n, K, vocab,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    FETCHING_REGISTERS: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES)
    WARPS: gl.constexpr = gl.num_warps()
    gl.warp_specialize(
        [
            (_multiply, (
                best_ptr, token_ptr, xs, ws, full, empty, tiles_m, tiles_n, K, vocab,
                ROWS, TOKENS, BLOCK_K, STAGES, WARPS,
            )),
            (_fetch, (x_desc, w_desc, xs, ws, full, empty, tiles_m, tiles_n, K, ROWS, TOKENS, BLOCK_K, STAGES)),
        ],
        [1],
        [FETCHING_REGISTERS],
    )  # fmt: skip


@triton.jit
def _pick_kernel(
    best_ptr, token_ptr, rows, out, out_start, out_index, last_tokens, programs, row_stride,
    PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = tl.load(rows + at)
    if row < 0:
        return
    out += tl.load(out_start) + tl.load(out_index + at)
    wait_for_previous_kernel(EARLY)
    program = tl.arange(0, PROGRAMS)
    best = tl.load(best_ptr + program * row_stride + at, mask=program < programs, other=float("-inf"))
    token = tl.load(token_ptr + program * row_stride + at, mask=program < programs, other=0x7FFFFFFF)
    winner = tl.min(tl.where(best == tl.max(best, 0), token, 0x7FFFFFFF), 0)
    tl.store(out, winner.to(out.dtype.element_ty))
    tl.store(last_tokens + row, winner.to(last_tokens.dtype.element_ty))


def greedy_head(hidden: Tensor, weight: Tensor, tile: HeadTile, to: DrawnTokens, vocab_size: int) -> None:
    """The token with the greatest logit for each hidden state [n, K], with the LM head's `weight` [N, K], both bfloat16
    and contiguous, K a multiple of HEAD_INPUTS. Only the first `vocab_size` of the N tokens count; the first wins among
    equals, and NaN counts as -inf."""
    count, inputs = hidden.shape
    tiles_m, tiles_n = triton.cdiv(count, tile.rows), triton.cdiv(vocab_size, tile.tokens)
    each = max(1, min(num_multiprocessors(hidden.device) // tiles_m, tiles_n))
    width = tiles_m * tile.rows
    best = torch.empty((each, width), dtype=torch.float32, device=hidden.device)
    token = torch.empty((each, width), dtype=torch.int32, device=hidden.device)
    greedy_head_kernel[(each * tiles_m,)](
        describe(hidden, tile.rows, HEAD_INPUTS), describe(weight, tile.tokens, HEAD_INPUTS),
        best, token, tiles_m, tiles_n, inputs, vocab_size,
        ROWS=tile.rows, TOKENS=tile.tokens, BLOCK_K=HEAD_INPUTS, STAGES=tile.stages,
        FETCHING_REGISTERS=FETCHING_REGISTERS, num_warps=MULTIPLYING_WARPS,
    )  # fmt: skip
    pick(best, token, to)


def pick(best: Tensor, token: Tensor, to: DrawnTokens) -> None:
    """The greatest of each row's logits [programs, n or more] and its token; the first token among equals."""
    programs, width = best.shape
    _pick_kernel[(len(to.rows),)](
        best, token, to.rows, to.out, to.out_start, to.out_index, to.last_tokens, programs, width,
        PROGRAMS=triton.next_power_of_2(programs), num_warps=1, **pdl_options(best.device),
    )  # fmt: skip
