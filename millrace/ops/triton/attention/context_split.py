"""Split KV for prefill: several programs share the keys of one tile of queries, and a second kernel combines them.

A short new turn after a long context has few query tiles: without splitting, most of the GPU would be idle while each
tile walks through all keys. Partial results go to the split workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.attention.decode import JOINED_ITEMS, SplitWorkspace, _join
from millrace.ops.triton.attention.paged_kv import AttentionShape, padded_dim
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MAX_COMBINE_WARPS = 16
"""Maximum warps of a combining program; each warp holds JOINED_ITEMS partial results in registers."""
WIDE, WIDE_WARPS = 128, 4
"""Wider results are combined by several programs, each with so many items and warps."""


@triton.jit(do_not_specialize=["parts"])
def _join_parts_kernel(
    partial_ptr, lse_ptr, out_ptr, parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (KV head, token, WIDTH items of the result): combine all parts, at most PARTS."""
    wait_for_previous_kernel(EARLY)
    stream = tl.program_id(1) * KV_HEADS + tl.program_id(0)
    d = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    g = tl.arange(0, GJ)
    joined = _join(partial_ptr, lse_ptr, stream * parts, parts, d, GROUP, GJ, GROUP, DP, PARTS)
    to = (stream.to(tl.int64) * GROUP + g)[:, None] * D + d[None, :]
    tl.store(out_ptr + to, joined.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Programs that share the keys of a tile, and the workspace for their partial results."""

    parts: int
    workspace: SplitWorkspace

    def check(self, num_tokens: int, shape: AttentionShape, window: int) -> None:
        if window:
            raise ValueError("keys inside a window cannot be split")
        vectors = num_tokens * shape.num_heads * self.parts
        if vectors > self.workspace.lse.numel():
            raise ValueError(f"{num_tokens} tokens in {self.parts} parts do not fit the workspace")

    def join(self, out: Tensor, shape: AttentionShape) -> None:
        """Combine the partial results in the workspace into `out` [T, heads · head_dim]."""
        parts, group = int(triton.next_power_of_2(self.parts)), int(triton.next_power_of_2(shape.group))
        width = padded_dim(shape.head_dim)
        own = min(width, WIDE)
        warps = WIDE_WARPS if own < width else parts * group * width // JOINED_ITEMS
        _join_parts_kernel[(shape.num_kv_heads, out.shape[0], width // own)](
            self.workspace.partial, self.workspace.lse, out, self.parts,
            KV_HEADS=shape.num_kv_heads, GROUP=shape.group, GJ=group, D=shape.head_dim, DP=width, WIDTH=own,
            PARTS=parts, num_warps=min(max(warps, 1), MAX_COMBINE_WARPS), **pdl_options(out.device),
        )  # fmt: skip
