"""Checkpoints of compressed-tensors (`quant_method: compressed-tensors`), written by llm-compressor.

Integers of 4 or 8 bits (`pack-quantized`: `weight_packed` int32; `int-quantized`: `weight` int8), FP8
(`float-quantized`) and FP4 or FP8 with small groups (NVFP4, MXFP4, MXFP8). `config_groups` say which modules have which
format. Rules for activations are not used: they are rounded only where the kernels of a device do so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    unpack_words,
    unsupported,
)
from millrace.models.formats.fp4 import fp4_matrix
from millrace.models.formats.fp8 import fp8_matrix
from millrace.models.formats.gptq import order_of_groups
from millrace.ops.linear.grouped_weight import GroupedWeight

FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)
_ENDS: Final = (
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "input_g_idx"),
    *("output_scale", "output_zero_point"),
)


class CompressedTensorsFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._ignored: tuple[str, ...] = tuple(settings.get("ignore") or ())
        self._groups: tuple[Mapping[str, Any], ...] = tuple((settings.get("config_groups") or {}).values())
        kinds = {group.get("format") or settings.get("format") or "dense" for group in self._groups}
        for kind in sorted(map(str, kinds - set(FORMATS))):
            raise unsupported(f"compressed-tensors in the format {kind}", f"Supported: {', '.join(FORMATS[:-2])}.")
        if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise unsupported("compressed-tensors with sparse weights", "Use a checkpoint with dense weights.")
        if settings.get("transform_config"):
            raise unsupported("compressed-tensors with transforms of activations", "Use a checkpoint without them.")

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        used = tuple(name for end in _ENDS if (name := f"{module}.{end}") in self._names)
        scale = f"{module}.weight_scale"
        if scale not in used:
            return None
        rule = self._rule_of(module)
        weights: Mapping[str, Any] = rule["weights"]
        bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
        if kind == "float" and bits == 4:
            return self._fp4(module, shape, used, weights)
        if kind == "float" and bits == 8:
            return self._fp8(module, shape, used, weights)
        if kind != "int" or bits not in (4, 8):
            raise unsupported(f"compressed-tensors with {kind} weights of {bits} bits", "Use one with 4 or 8 bits.")
        return self._integers(module, shape, used, weights, are_int8(rule.get("input_activations")))

    def _rule_of(self, module: str) -> Mapping[str, Any]:
        """The group that names the module, or its class."""
        if any(_matches(target, module) for target in self._ignored):
            raise ModelError(
                f"Module {module} has quantised weights, but quantization_config.ignore names it. The config and the"
                " weights belong to different models; download both again."
            )
        by_name = [group for group in self._groups if any(_matches(target, module) for target in group["targets"])]
        by_class = [group for group in self._groups if {"Linear", "Embedding"} & set(group["targets"])]
        for group in (*by_name, *by_class):
            if group.get("weights"):
                return group
        raise ModelError(
            f"Module {module} has quantised weights, but no group of quantization_config.config_groups names it."
            " Download config.json again."
        )

    # --- FP8 and FP4 ---

    def _fp8(
        self, module: str, shape: tuple[int, int], used: tuple[str, ...], weights: Mapping[str, Any]
    ) -> QuantisedMatrix:
        weight, scale = f"{module}.weight", f"{module}.weight_scale"
        if self._tensors.dtype(scale) == torch.uint8:
            return self._mxfp8(weight, scale, shape, used)
        block = weights.get("block_structure") if weights.get("strategy") == "block" else None
        if weights.get("strategy") == "group":
            block = (1, int(weights["group_size"]))
        return fp8_matrix(self._tensors, weight, scale, shape, block, used, "FP8")

    def _mxfp8(self, weight: str, scale: str, shape: tuple[int, int], used: tuple[str, ...]) -> QuantisedMatrix:
        outputs, inputs = shape
        check_shape(self._tensors, scale, (outputs, inputs // 32))

        def read(dtype: torch.dtype) -> GroupedWeight:
            scales = self._tensors.raw(scale).view(torch.float8_e8m0fnu)
            return GroupedWeight(self._tensors.raw(weight), scales, inputs, 32, dtype)

        return QuantisedMatrix("MXFP8, groups of 32", shape, used, items(shape) + items(shape) // 32, read)

    def _fp4(
        self, module: str, shape: tuple[int, int], used: tuple[str, ...], weights: Mapping[str, Any]
    ) -> QuantisedMatrix:
        packed, scale, whole = (f"{module}.{end}" for end in ("weight_packed", "weight_scale", "weight_global_scale"))
        number = whole if whole in used else None
        group = int(weights.get("group_size") or (32 if number is None else 16))
        return fp4_matrix(self._tensors, packed, scale, number, shape, group, used, is_divisor=True)

    # --- integers ---

    def _integers(
        self,
        module: str,
        shape: tuple[int, int],
        used: tuple[str, ...],
        weights: Mapping[str, Any],
        int8_inputs: bool,
    ) -> QuantisedMatrix:
        outputs, inputs = shape
        scale, zero_point = f"{module}.weight_scale", f"{module}.weight_zero_point"
        is_packed = f"{module}.weight_packed" in used
        bits = int(weights["num_bits"])
        stored_bits = bits if is_packed else 8
        group = int(weights["group_size"]) if weights.get("strategy") == "group" else inputs
        if weights.get("strategy") not in ("group", "channel", "tensor"):
            raise unsupported(
                f"compressed-tensors with integer weights of the strategy {weights.get('strategy')}",
                "Use the strategy group, channel or tensor.",
            )
        groups = -(-inputs // group)
        if items(self._tensors.shape(scale)) != 1:
            check_shape(self._tensors, scale, (outputs, groups))
        check_shape(
            self._tensors,
            f"{module}.weight_packed" if is_packed else f"{module}.weight",
            (outputs, -(-inputs * bits // 32)) if is_packed else shape,
        )
        has_zeros = zero_point in used and not weights.get("symmetric", True)
        g_idx = f"{module}.weight_g_idx"
        order = order_of_groups(self._tensors.raw(g_idx), group) if g_idx in used else None
        where = f"groups of {group}" if group < inputs else "a scale per output"
        return QuantisedMatrix(
            label=f"INT{bits}, {where}" + ("" if order is None else ", act-order"),
            shape=shape,
            tensors=used,
            num_bytes=items(shape) * stored_bits // 8
            + outputs * groups * (self._tensors.dtype(scale).itemsize + has_zeros),
            read=partial(self._read_integers, module, shape, bits, group, has_zeros, order, int8_inputs),
            gguf=gguf_of(stored_bits, group, inputs, zero=8, has_zeros=has_zeros),
            has_order=order is not None,
        )

    def _read_integers(
        self,
        module: str,
        shape: tuple[int, int],
        bits: int,
        group: int,
        has_zeros: bool,
        order: torch.Tensor | None,
        int8_inputs: bool,
        dtype: torch.dtype,
    ) -> GroupedWeight:
        """Codes as unsigned integers: what is stored as signed is moved up by 128."""
        outputs, inputs = shape
        packed, zero_point = f"{module}.weight_packed", f"{module}.weight_zero_point"
        is_packed = packed in self._names
        if is_packed:
            codes = unpack_words(self._tensors.raw(packed), bits)[:, :inputs]
        else:
            codes, bits = self._tensors.raw(f"{module}.weight").view(torch.uint8) ^ 128, 8
        scales = self._tensors.raw(f"{module}.weight_scale")
        scales = scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales
        zeros = None
        if has_zeros:
            stored = self._tensors.raw(zero_point)
            if stored.dtype == torch.int32:  # packed along the outputs
                zeros = unpack_words(stored.t(), bits).t()[:outputs]
            else:
                zeros = (stored.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8).reshape(-1, scales.shape[1])
            zeros = zeros.expand(outputs, scales.shape[1]).contiguous()
        return GroupedWeight(
            codes=pack_codes(codes if order is None else codes[:, order], bits),
            scales=scales.contiguous(),
            in_features=inputs,
            group=group,
            dtype=dtype,
            zero=1 << (bits - 1),
            zeros=zeros,
            order=order,
            int8_inputs=int8_inputs,
        )


def are_int8(activations: Mapping[str, Any] | None) -> bool:
    """True if a checkpoint's activations are symmetric INT8; static scales are not used (docs/formats.md)."""
    if activations is None or not activations.get("symmetric", True):
        return False
    return bool(activations.get("type", "int") == "int" and activations.get("num_bits", 8) == 8)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module or module.endswith(f".{target}")
