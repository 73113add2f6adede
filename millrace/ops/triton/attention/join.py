"""Prompts behind a long context: few tiles, whose keys are shared out among several programs, and the join of these.

A short new turn after a long history has so few tiles of queries that most of the chip would be idle while each of them
walks through all keys. The results of the programs that share a tile go to the workspace of split rows, and a second
kernel joins them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.attention.decode import JOINED_ITEMS, SplitWorkspace, _join_few
from millrace.ops.triton.attention.parts import HeadShape, padded_dim
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MOST_JOINING_WARPS = 16
"""As many as have registers for their share of JOINED_ITEMS."""


@triton.jit(do_not_specialize=["parts"])
def _join_parts_kernel(
    partial_ptr, lse_ptr, out_ptr, parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (KV head, token): the results of all parts, of which there are at most PARTS, as one."""
    wait_for_previous_kernel(EARLY)
    stream = tl.program_id(1) * KV_HEADS + tl.program_id(0)
    d = tl.arange(0, DP)
    g = tl.arange(0, GJ)
    joined = _join_few(partial_ptr, lse_ptr, stream * parts, parts, d, GROUP, GJ, GROUP, DP, PARTS)
    to = (stream.to(tl.int64) * GROUP + g)[:, None] * D + d[None, :]
    tl.store(out_ptr + to, joined.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """How many programs share the keys of a tile, and where their results are until they are joined."""

    parts: int
    workspace: SplitWorkspace

    def check(self, num_tokens: int, shape: HeadShape, window: int) -> None:
        if window:
            raise ValueError("keys inside a window are not shared out")
        vectors = num_tokens * shape.num_heads * self.parts
        if vectors > self.workspace.lse.numel():
            raise ValueError(f"{num_tokens} tokens in {self.parts} parts do not fit the workspace")

    def join(self, out: Tensor, shape: HeadShape) -> None:
        """`out` [T, heads · head_dim] from what the parts have left in the workspace."""
        parts, group = int(triton.next_power_of_2(self.parts)), int(triton.next_power_of_2(shape.group))
        width = padded_dim(shape.head_dim)
        warps = parts * group * width // JOINED_ITEMS
        _join_parts_kernel[(shape.num_kv_heads, out.shape[0])](
            self.workspace.partial, self.workspace.lse, out, self.parts,
            KV_HEADS=shape.num_kv_heads, GROUP=shape.group, GJ=group, D=shape.head_dim, DP=width, PARTS=parts,
            num_warps=min(max(warps, 1), MOST_JOINING_WARPS), **pdl_options(out.device),
        )  # fmt: skip
