"""torchao checkpoints in safetensors: INT4, INT8 and FP8 weights.

A weight is stored as `_weight_qdata`, `_weight_scale` and perhaps `_weight_zero_point`; the file's header describes it
under the weight's name: its type, its block of one scale, how activations are quantised (not used). Layouts made for
one kernel on one GPU are refused.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Final

import torch

from millrace.errors import ModelError
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
from millrace.models.formats.fp8 import fp8_matrix
from millrace.ops.linear.grouped_weight import GroupedWeight

_PARTS: Final = ("qdata", "scale", "zero_point")
_TYPES: Final = ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


class TorchAoFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._header = tensors.metadata()
        if "tensor_names" not in self._header:
            raise unsupported(
                "torchao, but its safetensors files do not describe their tensors",
                "Save the model again with torchao 0.14 or later.",
            )

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        data, scale, zero_point = (f"{module}._weight_{end}" for end in _PARTS)
        if data not in self._names:
            return None
        described: dict[str, Any] = json.loads(self._header.get(f"{module}.weight", "{}"))
        kind, fields = described.get("_type"), described.get("_data", {})
        if kind not in _TYPES:
            raise unsupported(f"torchao's {kind}", f"Supported: {', '.join(_TYPES)}.")
        if fields.get("act_pre_scale") or f"{module}._weight_act_pre_scale" in self._names:
            raise unsupported("torchao with scales of activations", "Use a checkpoint without act_pre_scale.")
        used = tuple(name for name in (data, scale, zero_point) if name in self._names)
        rows, group = (int(size) for size in fields["block_size"])
        if kind == "Float8Tensor":
            block = None if group >= shape[1] and rows in (1, shape[0]) else (rows, group)
            return fp8_matrix(self._tensors, data, scale, shape, block, used, "torchao FP8")
        if rows != 1 or shape[1] % group:
            raise unsupported(f"torchao with blocks of {rows} × {group}", "Use a scale per output or group of inputs.")
        if kind == "Int4Tensor":
            return self._int4(used, shape, group)
        return self._integers(used, shape, group, fields)

    def _int4(self, used: tuple[str, ...], shape: tuple[int, int], group: int) -> QuantisedMatrix:
        """value = signed code * scale + zero point, both [groups, N]."""
        data, scale, zero_point = used
        groups = shape[1] // group
        check_shape(self._tensors, data, (shape[0], shape[1] // 2))
        for name in (scale, zero_point):
            check_shape(self._tensors, name, (groups, shape[0]))

        def read(dtype: torch.dtype) -> GroupedWeight:
            return GroupedWeight(
                codes=self._tensors.raw(data).view(torch.uint8) ^ 0x88,
                scales=self._tensors.raw(scale).t().contiguous(),
                in_features=shape[1],
                group=group,
                dtype=dtype,
                zero=8,
                offsets=self._tensors.raw(zero_point).t().contiguous(),
            )

        sizes = sum(self._tensors.dtype(name).itemsize for name in (scale, zero_point))
        num_bytes = items(shape) // 2 + groups * shape[0] * sizes
        kind = gguf_of(4, group, shape[1], has_zeros=True)
        return QuantisedMatrix(f"torchao INT4, groups of {group}", shape, used, num_bytes, read, kind)

    def _integers(
        self, used: tuple[str, ...], shape: tuple[int, int], group: int, fields: dict[str, Any]
    ) -> QuantisedMatrix:
        """Signed codes in bytes. Those that have only 4 bits are packed."""
        data, scale = used[:2]
        bits = 4 if fields.get("target_dtype", {}).get("_data") == "int4" else 8
        if fields.get("target_dtype", {}).get("_data", "int8") not in ("int4", "int8"):
            raise unsupported(f"torchao with weights of {fields['target_dtype']['_data']}", "Use int4 or int8.")
        groups = shape[1] // group
        check_shape(self._tensors, data, shape)
        check_shape(self._tensors, scale, (shape[0], groups))
        has_zeros = len(used) > 2 and bool(self._tensors.raw(used[2]).any())
        where = f"groups of {group}" if group < shape[1] else "a scale per output"
        return QuantisedMatrix(
            label=f"torchao INT{bits}, {where}",
            shape=shape,
            tensors=used,
            num_bytes=items(shape) * bits // 8 + shape[0] * groups * (self._tensors.dtype(scale).itemsize + has_zeros),
            read=partial(self._read_integers, used, shape, group, bits, has_zeros),
            gguf=gguf_of(bits, group, shape[1], zero=8, has_zeros=has_zeros),
        )

    def _read_integers(
        self,
        used: tuple[str, ...],
        shape: tuple[int, int],
        group: int,
        bits: int,
        has_zeros: bool,
        dtype: torch.dtype,
    ) -> GroupedWeight:
        middle = 1 << (bits - 1)
        stored = self._tensors.raw(used[0])
        if bits == 4 and (int(stored.min()) < -middle or int(stored.max()) >= middle):
            raise ModelError(f"{self._tensors.file_of(used[0])}: tensor {used[0]} has numbers of more than 4 bits.")
        zeros = (self._tensors.raw(used[2]).to(torch.int16) + middle).to(torch.uint8) if has_zeros else None
        return GroupedWeight(
            codes=pack_codes((stored.to(torch.int16) + middle).to(torch.uint8), bits),
            scales=self._tensors.raw(used[1]),
            in_features=shape[1],
            group=group,
            dtype=dtype,
            zero=middle,
            zeros=zeros,
        )
