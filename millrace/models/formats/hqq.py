"""HQQ checkpoints (`quant_method: hqq`): 4- or 8-bit codes with a scale and a zero point, both floats, per group of
inputs.

All groups [N K / group, group] of a matrix follow each other. `W_q` uint8 holds a code per byte, or with 4 bits the
groups of the first half in the upper halves of the bytes and the others in the lower; `scale` and `zero` have a number
per group: value = (code - zero) * scale. The other tensors of a module repeat its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from millrace.models.formats.base import (
    QuantisedMatrix,
    Settings,
    StoredTensors,
    check_shape,
    gguf_of,
    items,
    pack_codes,
    unsupported,
)
from millrace.ops.linear.grouped_weight import GroupedWeight

_REST: Final = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)


class HqqFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._rules: Mapping[str, Any] = settings.get("quant_config") or {}

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        packed, scale, zero = (f"{module}.{end}" for end in ("W_q", "scale", "zero"))
        if packed not in self._names:
            return None
        bits, group = self._rule_of(module)
        inputs = shape[1]
        group = group or inputs
        if scale not in self._names or zero not in self._names or inputs % group:
            raise unsupported(
                "HQQ whose scales are quantised too, or whose groups do not divide the inputs",
                "Quantise it with a group size of 64 and without quant_zero and quant_scale.",
            )
        count = items(shape) // group
        if items(self._tensors.shape(scale)) != count:
            check_shape(self._tensors, scale, (count, 1))
        if items(self._tensors.shape(zero)) != count:
            check_shape(self._tensors, zero, (count, 1))
        check_shape(self._tensors, packed, (count * bits // 8, group))
        used = (packed, scale, zero, *(name for end in _REST if (name := f"{module}.{end}") in self._names))
        return QuantisedMatrix(
            label=f"HQQ {bits}-bit, groups of {group}",
            shape=shape,
            tensors=used,
            num_bytes=items(shape) * bits // 8 + count * (self._tensors.dtype(scale).itemsize + 4),
            read=partial(self._read, module, shape, bits, group),
            gguf=gguf_of(bits, group, inputs, has_zeros=True),
            group=group,
        )

    def _rule_of(self, module: str) -> tuple[int, int]:
        """Bits and inputs per group, 0 for all. `quant_config` is a rule, or rules by the end of a module's name."""
        rules, named = self._rules, [end for end in self._rules if module.endswith(f".{end}")]
        if named:
            rules = rules[max(named, key=len)]
        rule: Mapping[str, Any] = rules.get("weight_quant_params", rules)
        bits = int(rule.get("nbits", 4))
        if bits not in (4, 8):
            raise unsupported(f"HQQ with {bits} bits", "Use one with 4 or 8 bits.")
        if int(rule.get("axis", 1)) != 1:
            raise unsupported("HQQ along the outputs (axis 0)", "Quantise the model again with axis=1.")
        if rule.get("view_as_float"):
            raise unsupported("HQQ with view_as_float", "Quantise the model again without view_as_float.")
        return bits, int(rule.get("group_size") or 0)

    def _read(self, module: str, shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype) -> GroupedWeight:
        outputs, inputs = shape
        codes = self._tensors.raw(f"{module}.W_q")
        if bits == 4:
            codes = torch.cat((codes >> 4, codes & 15))
        scales = self._tensors.raw(f"{module}.scale").reshape(outputs, -1).contiguous()
        zeros = self._tensors.raw(f"{module}.zero").reshape(outputs, -1)
        return GroupedWeight(
            codes=pack_codes(codes.reshape(outputs, inputs), bits),
            scales=scales,
            in_features=inputs,
            group=group,
            dtype=dtype,
            offsets=-zeros.float() * scales.float(),
        )
