"""Rows of a quantised weight, dequantised as they are looked up."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from millrace.ops.linear.block_weight import BlockWeight
from millrace.ops.linear.grouped_weight import GroupedWeight

KeptWeight = GroupedWeight | BlockWeight


def rows_of(weight: KeptWeight, ids: Tensor) -> Tensor:
    """int64 [T] -> [T, K] in the weight's dtype. Nothing waits for the device."""
    if isinstance(weight, BlockWeight):
        from millrace.ops.triton.blocks.product import decode, operand  # slow to import

        return decode(operand(weight.kind, weight.blocks.index_select(0, ids), weight.in_features), weight.dtype)
    own = {
        name: part.index_select(0, ids)
        for name in ("codes", "zeros", "output_scales", "offsets")
        if (part := getattr(weight, name)) is not None
    }
    scales = weight.scales.index_select(0, ids // weight.rows_per_scale)
    return replace(weight, **own, scales=scales, rows_per_scale=1).dequantised().to(weight.dtype)
