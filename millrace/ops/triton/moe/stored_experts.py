"""Products with experts whose weights are codes with scales, or GGUF blocks: tiles are decoded in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.ops.triton.blocks.decode import decode_tile
from millrace.ops.triton.blocks.product import DEPTH, BlockOperand
from millrace.ops.triton.gemm.grouped import GroupedOperand, grouped_tile
from millrace.ops.triton.moe.config import power_of_two
from millrace.ops.triton.moe.experts import Groups, max_tiles
from millrace.ops.triton.moe.kernels import find_rows

GROUPED = 0
"""In place of a GGUF format: a weight of codes with scales."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """`rows`: slots of one expert, `columns`: outputs."""

    rows: int
    columns: int = 64
    warps: int = 4
    stages: int = 2


FIXED = ExpertTiles(32)
"""For any number of tokens: a token's result does not depend on the others."""


def choose_tiles(slots: int, num_experts: int) -> ExpertTiles:
    mean = slots / num_experts
    return ExpertTiles(16 if mean <= 16 else 32 if mean <= 64 else 64)


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _experts_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, levels_ptr, output_scales_ptr, offsets_ptr, bias_ptr, out_ptr,
    counts_ptr, table_ptr, num_slots, capacity, N, K, num_groups, rows_per_scale, group, zero, row_bytes,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, SLOTS_PER_ROW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, FOUR_BITS: tl.constexpr,
    EXPONENTS: tl.constexpr, KIND: tl.constexpr, ITEMS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """BM slots of one expert and BN outputs of out[slot] = x[slot // SLOTS_PER_ROW] · w[expert]ᵀ + bias[expert].

    Experts follow each other along the outputs. KIND: 0 for codes with scales, else the GGUF format of `codes_ptr`."""
    tiles_n = (N + BN - 1) // BN
    tile = tl.program_id(0) // tiles_n
    columns = tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    expert, slots, real = find_rows(counts_ptr, table_ptr, capacity, tile, EXPERTS, EXPERT_BLOCK, BM)
    if expert >= EXPERTS:
        return
    slots = tl.minimum(tl.maximum(slots, 0), num_slots - 1)
    in_columns = columns < N
    outputs = expert.to(tl.int64) * N + tl.minimum(columns, N - 1)
    x_rows = x_ptr + (slots // SLOTS_PER_ROW).to(tl.int64)[:, None] * K
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        inputs = first + tl.arange(0, BK)
        x = tl.load(x_rows + inputs[None, :], mask=real[:, None] & (inputs < K)[None, :], other=0.0)
        if KIND == 0:
            values = grouped_tile(
                codes_ptr, scales_ptr, zeros_ptr, levels_ptr, offsets_ptr, outputs, in_columns, first, K,
                num_groups, rows_per_scale, group, zero, BN, BK, GROUPS, FOUR_BITS, EXPONENTS,
            )  # fmt: skip
        else:
            values = decode_tile(
                codes_ptr, outputs, first, N, K, row_bytes, levels_ptr, KIND, ITEMS, BYTES, GROUP, BN, BK
            )  # fmt: skip
        acc = tl.dot(x, tl.trans(values.to(x.dtype)), acc)
    if output_scales_ptr is not None:
        acc *= tl.load(output_scales_ptr + outputs)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    places = slots.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_columns[None, :])


def expert_product(
    x: Tensor,
    weight: GroupedOperand | BlockOperand,
    tile_k: int,
    groups: Groups,
    slots_per_row: int,
    tiles: ExpertTiles,
    bias: Tensor | None = None,
) -> Tensor:
    """[slots, N] in slot order. The weight's outputs are those of all experts; x has a row per `slots_per_row`
    slots; `bias` [E, N]."""
    num_experts = groups.counts.numel()
    outputs = weight.outputs // num_experts
    out = torch.empty((groups.slots, outputs), dtype=x.dtype, device=x.device)
    count = max_tiles(groups.slots, num_experts, tiles.rows)
    shared = {
        "EXPERTS": num_experts, "EXPERT_BLOCK": power_of_two(num_experts), "SLOTS_PER_ROW": slots_per_row,
        "BM": tiles.rows, "BN": tiles.columns, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    sizes = (groups.counts, groups.table, groups.slots, groups.table.shape[1], outputs, weight.inputs)
    grid = (count * triton.cdiv(outputs, tiles.columns),)
    if isinstance(weight, BlockOperand):
        kind = weight.kind
        _experts_kernel[grid](
            x, weight.blocks, None, None, weight.table, None, None, bias, out, *sizes, 0, 1, 1, 0,
            weight.blocks.shape[1], BK=DEPTH, GROUPS=1, FOUR_BITS=False, EXPONENTS=False, KIND=kind.code,
            ITEMS=kind.items, BYTES=kind.num_bytes, GROUP=kind.group, **shared,
        )  # fmt: skip
        return out
    _experts_kernel[grid](
        x, weight.codes, weight.scales, weight.zeros, weight.levels, weight.output_scales, weight.offsets, bias, out,
        *sizes, weight.scales.shape[1], weight.rows_per_scale, weight.group, weight.zero, 0,
        BK=tile_k, GROUPS=max(1, tile_k // weight.group), FOUR_BITS=weight.is_four_bits,
        EXPONENTS=weight.scales.dtype == torch.uint8, KIND=GROUPED, ITEMS=1, BYTES=1, GROUP=1, **shared,
    )  # fmt: skip
    return out
