"""bitsandbytes checkpoints: NF4 or FP4 in blocks, and INT8 with a scale per output.

4 bits: `weight` uint8 [N K / 2, 1], the first of two inputs in the high half; `weight.absmax` per block of consecutive
numbers, itself quantised to 8 bits if there is a `weight.nested_absmax`; `weight.quant_map` the 16 levels; the rest as
JSON in `weight.quant_state.bitsandbytes__nf4`. INT8: `weight` int8 [N, K], `SCB` the largest magnitude per output.
Outliers of activations need no path of their own: activations are not rounded.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.formats.base import (
    QuantisedMatrix,
    Settings,
    StoredTensors,
    check_shape,
    gguf_of,
    items,
    unsupported,
)
from millrace.ops.linear.grouped_weight import GroupedWeight

_STATE = "quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class BitsAndBytesFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        self._tensors, self._names = tensors, frozenset(tensors.names())

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        if f"{module}.SCB" in self._names:
            return self._int8(module, shape)
        if f"{module}.weight.absmax" in self._names:
            return self._four_bits(module, shape)
        return None

    # --- INT8 ---

    def _int8(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix:
        weight, scale, layout = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
        check_shape(self._tensors, weight, shape)
        check_shape(self._tensors, scale, (shape[0],))
        if layout in self._names and bool(self._tensors.raw(layout).any()):
            raise unsupported("bitsandbytes INT8 in a layout other than row", "Save the model again on a CPU.")

        def read(dtype: torch.dtype) -> GroupedWeight:
            scales = (self._tensors.raw(scale).float() / 127)[:, None]
            return GroupedWeight(self._tensors.raw(weight), scales, shape[1], shape[1], dtype)

        return QuantisedMatrix(
            label="bitsandbytes INT8, a scale per output",
            shape=shape,
            tensors=tuple(name for name in (weight, scale, layout) if name in self._names),
            num_bytes=items(shape) + 4 * shape[0],
            read=read,
            gguf=gguf_of(8, shape[1], shape[1]),
        )

    # --- 4 bits ---

    def _four_bits(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix:
        weight = f"{module}.weight"
        state_name = next((name for kind in ("nf4", "fp4") if (name := f"{weight}.{_STATE}{kind}") in self._names), "")
        if not state_name:
            raise ModelError(f"{self._tensors.file_of(weight)}: tensor {weight} has no {_STATE}nf4. Save it again.")
        state: dict[str, Any] = json.loads(bytes(self._tensors.raw(state_name).tolist()))
        if tuple(state["shape"]) != shape:
            raise ModelError(
                f"{self._tensors.file_of(weight)}: tensor {weight} was quantised from the shape {state['shape']}; the"
                f" config requires {shape}. The config and the weights belong to different models."
            )
        block = int(state["blocksize"])
        if shape[1] % block:
            raise unsupported(
                f"bitsandbytes with blocks of {block} across rows of {shape[1]} inputs",
                f"Use blocks that divide {shape[1]}.",
            )
        check_shape(self._tensors, weight, (items(shape) // 2, 1))
        return QuantisedMatrix(
            label=f"bitsandbytes {state['quant_type'].upper()}, groups of {block}",
            shape=shape,
            tensors=(weight, state_name, *(name for end in _PARTS if (name := f"{weight}.{end}") in self._names)),
            num_bytes=items(shape) // 2 + 4 * items(shape) // block,
            read=partial(self._read_four_bits, weight, shape, block, state),
        )

    def _read_four_bits(
        self, weight: str, shape: tuple[int, int], block: int, state: dict[str, Any], dtype: torch.dtype
    ) -> GroupedWeight:
        packed = self._tensors.raw(weight).view(shape[0], -1)
        return GroupedWeight(
            codes=(packed >> 4) | (packed << 4),
            scales=self._absmax(weight, state).view(shape[0], -1),
            in_features=shape[1],
            group=block,
            dtype=dtype,
            levels=self._tensors.raw(f"{weight}.quant_map").float(),
        )

    def _absmax(self, weight: str, state: dict[str, Any]) -> Tensor:
        """float32; those of nested statistics are dequantised, 0.4 bits more per weight than stored."""
        absmax = self._tensors.raw(f"{weight}.absmax")
        if f"{weight}.nested_absmax" not in self._names:
            return absmax.float()
        levels = self._tensors.raw(f"{weight}.nested_quant_map").float()[absmax.int()]
        outer = self._tensors.raw(f"{weight}.nested_absmax").float()
        by_item = outer.repeat_interleave(int(state["nested_blocksize"]))[: len(levels)]
        return levels * by_item + float(state["nested_offset"])
