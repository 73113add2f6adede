"""Latent attention over the paged cache (`ops/attention/latent.py`): tiles of query vectors of one row, all of which
read the same latents.

A latent is loaded once per tile, as keys and as values. Lengths are read on the device, as in `prefill.py`: the grid is
an upper bound, and programs without work return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.base.capability import capability, has_large_shared_memory
from millrace.ops.triton.attention.context_split import ContextSplit
from millrace.ops.triton.attention.decode import SplitWorkspace
from millrace.ops.triton.attention.paged_kv import (
    TRITON_TYPES,
    AttentionShape,
    PagedRows,
    padded_dim,
    padded_vectors,
    precision,
)
from millrace.ops.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MAX_VECTORS = 64
"""Query vectors of a program: more sums of latents do not fit its registers."""
MAX_PARTS = 32


@triton.jit
def _latent_kernel(
    q_ptr, kv_ptr, out_ptr, partial_ptr, lse_ptr, tiles, query_starts, seq_lens, table_rows, tables,
    softmax_scale, q_stride, table_stride, block_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr,
    RANK: tl.constexpr, RANK_P: tl.constexpr, ROPE: tl.constexpr, ROPE_P: tl.constexpr, BS: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile and group of heads, part of the keys). A tile holds QUERIES queries of one row."""
    wait_for_previous_kernel(EARLY)
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    index = tl.program_id(0) // GROUPS
    row = tl.load(tiles + index * 2)
    if row < 0:
        return
    offset = tl.load(tiles + index * 2 + 1)
    start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - start
    context = tl.load(seq_lens + row) - num_queries

    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, RANK_P)
    r = tl.arange(0, ROPE_P)
    local = offset + i // GROUP
    heads = tl.program_id(0) % GROUPS * GROUP + i % GROUP
    real = (i < QUERIES * GROUP) & (local < num_queries) & (heads < HEADS)
    token = (start + local).to(tl.int64)
    positions = context + local
    mine = q_ptr + token * q_stride + heads * (RANK + ROPE)
    q = tl.load(mine[:, None] + d[None, :], mask=real[:, None] & (d < RANK)[None, :], other=0.0)
    rotated = tl.load(mine[:, None] + RANK + r[None, :], mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride

    begin = 0
    end = context + tl.minimum(offset + QUERIES, num_queries)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, TILE), tl.num_programs(1)) * TILE
        begin = tl.minimum(tl.program_id(1) * share, end)
        end = tl.minimum(begin + share, end)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, RANK_P], tl.float32)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        keys = at + tl.arange(0, TILE)
        inside = keys < end
        block = tl.load(table + keys // BS, mask=inside, other=0).to(tl.int64)
        where = (kv_ptr + block * block_stride + keys % BS * (RANK + ROPE))[:, None]
        # Slots that no query sees may hold anything.
        latents = tl.load(where + d[None, :], mask=inside[:, None] & (d < RANK)[None, :], other=0.0)
        shared = tl.load(where + RANK + r[None, :], mask=inside[:, None] & (r < ROPE)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        s = tl.dot(rotated, tl.trans(shared), s, input_precision=PRECISION)
        s = s * (softmax_scale * 1.4426950408889634)
        s = tl.where(inside[None, :] & (keys[None, :] <= positions[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - safe[:, None])
        before = tl.math.exp2(m - safe)
        z = z * before + tl.sum(p, 1)
        sums = tl.dot(p.to(DTYPE), latents, sums * before[:, None], input_precision=PRECISION)
        m = m_new
    sums = sums / tl.where(z == 0.0, 1.0, z)[:, None]
    if SPLIT:
        # A program without keys stores zeros and a log-sum-exp of -inf.
        cell = (token * HEADS + heads) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial_ptr + cell[:, None] * RANK_P + d[None, :], sums, mask=real[:, None])
        tl.store(lse_ptr + cell, m + tl.math.log2(z), mask=real)
    else:
        to = out_ptr + ((token * HEADS + heads) * RANK)[:, None] + d[None, :]
        tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=real[:, None] & (d < RANK)[None, :])


@dataclass(frozen=True, slots=True)
class LatentShape:
    num_heads: int
    rank: int
    rope_dim: int
    scale: float

    @property
    def group(self) -> int:
        """Heads of a program."""
        return min(self.num_heads, MAX_VECTORS)

    @property
    def queries_per_tile(self) -> int:
        return MAX_VECTORS // self.group

    @property
    def summed(self) -> AttentionShape:
        """Of what it gives, for parts of it that are combined."""
        return AttentionShape(self.num_heads, self.num_heads, self.rank, self.scale)

    def parts(self, num_tiles: int, num_programs: int) -> int:
        """Programs that share the keys of a tile, so that all tiles together have about `num_programs`."""
        return max(1, min(MAX_PARTS, num_programs // (num_tiles * self.num_groups)))

    @property
    def num_groups(self) -> int:
        return -(-self.num_heads // self.group)

    def workspace(self, num_programs: int, device: torch.device) -> SplitWorkspace:
        """Room for the results of so many programs, which `parts` never exceeds."""
        return SplitWorkspace(-(-num_programs * MAX_VECTORS // padded_vectors(self.summed)), self.summed, device)


def tile_size(is_half: bool, is_large: bool) -> int:
    """Keys of a tile. 64 queries of 512 latents and two tiles of 32 keys take 112 KiB of shared memory."""
    return 32 if is_half and is_large else 16


def attend_latents(
    queries: Tensor,
    kv: Tensor,
    out: Tensor,
    tiles: Tensor,
    rows: PagedRows,
    shape: LatentShape,
    split: ContextSplit | None = None,
) -> None:
    """`tiles` as for `prefill`, every query in one. With `split` several programs share the keys of a tile."""
    if split is not None:
        split.check(queries.shape[0], shape.summed, 0)
    is_half = queries.dtype.itemsize == 2
    is_large = queries.device.type != "cuda" or has_large_shared_memory(capability(queries.device))
    tile = tile_size(is_half, is_large)
    _latent_kernel[(tiles.shape[0] * shape.num_groups, 1 if split is None else split.parts)](
        queries, kv, out,
        None if split is None else split.workspace.partial, None if split is None else split.workspace.lse,
        tiles, rows.query_starts, rows.seq_lens, rows.table_rows, rows.block_tables,
        shape.scale, queries.stride(0), rows.block_tables.stride(0), kv.stride(1),
        HEADS=shape.num_heads, GROUP=shape.group, QUERIES=shape.queries_per_tile, BLOCK_M=MAX_VECTORS,
        RANK=shape.rank, RANK_P=padded_dim(shape.rank), ROPE=shape.rope_dim, ROPE_P=padded_dim(shape.rope_dim),
        BS=kv.shape[3], TILE=tile, PRECISION=precision(queries), DTYPE=TRITON_TYPES[queries.dtype],
        STAGES=2 if is_half else 1, SPLIT=split is not None, num_warps=8, **pdl_options(queries.device),
    )  # fmt: skip
    if split is not None:
        split.join(out, shape.summed)
