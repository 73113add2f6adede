"""AWQ checkpoints (`quant_method: awq`): 4-bit codes with a scale and a zero point per group of inputs.

`qweight` int32 [K, N / 8]: eight outputs of one input per word; `qzeros` int32 [K / group, N / 8] likewise; `scales`
float16 [K / group, N]. The outputs of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits. The version
gemv stores outputs in rows and their inputs in order: `qweight` [N, K / 8], `qzeros` [N, groups / 8], `scales`
[N, groups], the last two padded with zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

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
from millrace.ops.linear.grouped_weight import GroupedWeight

_FIELDS: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The 4-bit field, from the lowest, that holds output 0, 1, 2, … of a word."""


class AwqFormat:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
        if version not in ("gemm", "gemv"):
            raise unsupported(f"AWQ in the layout {version}", "Use a checkpoint in the layout gemm, the usual one.")
        self._is_by_output = version == "gemv"
        if bits != 4:
            raise unsupported(f"AWQ with {bits} bits", "Use one with 4 bits.")
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._group = int(settings.get("group_size", settings.get("q_group_size", 128)))

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        qweight, qzeros, scales = (f"{module}.{end}" for end in ("qweight", "qzeros", "scales"))
        if qweight not in self._names:
            return None
        outputs, inputs = shape
        group = self._group if self._group > 0 else inputs
        groups = -(-inputs // group)
        has_zeros = qzeros in self._names
        if self._is_by_output:
            check_shape(self._tensors, qweight, (outputs, inputs // 8))
            words = max(self._tensors.shape(qzeros)[-1] if has_zeros else 0, -(-groups // 8))
            check_shape(self._tensors, scales, (outputs, 8 * words))
        else:
            check_shape(self._tensors, qweight, (inputs, outputs // 8))
            check_shape(self._tensors, scales, (groups, outputs))
            words = outputs // 8
        if has_zeros:
            check_shape(self._tensors, qzeros, (outputs if self._is_by_output else groups, words))
        num_bytes = items(shape) // 2 + groups * outputs * (self._tensors.dtype(scales).itemsize + has_zeros)
        return QuantisedMatrix(
            label=f"AWQ 4-bit, groups of {group}",
            shape=shape,
            tensors=(qweight, scales, qzeros) if has_zeros else (qweight, scales),
            num_bytes=num_bytes,
            read=partial(self._read, module, has_zeros, group),
            gguf=gguf_of(4, group, inputs, zero=8, has_zeros=has_zeros),
        )

    def _read(self, module: str, has_zeros: bool, group: int, dtype: torch.dtype) -> GroupedWeight:
        qweight, scales = self._tensors.raw(f"{module}.qweight"), self._tensors.raw(f"{module}.scales")
        zeros = self._tensors.raw(f"{module}.qzeros") if has_zeros else None
        if self._is_by_output:
            groups = -(-8 * qweight.shape[1] // group)
            return GroupedWeight(
                codes=pack_codes(unpack_words(qweight, 4), 4),
                scales=scales[:, :groups].contiguous(),
                in_features=8 * qweight.shape[1],
                group=group,
                dtype=dtype,
                zero=8,
                zeros=None if zeros is None else unpack_words(zeros, 4)[:, :groups].contiguous(),
            )
        return GroupedWeight(
            codes=pack_codes(_by_output(qweight), 4),
            scales=scales.t().contiguous(),
            in_features=qweight.shape[0],
            group=group,
            dtype=dtype,
            zero=8,
            zeros=None if zeros is None else _by_output(zeros),
        )


def _by_output(words: Tensor) -> Tensor:
    """int32 [rows, N / 8] to uint8 [N, rows]."""
    fields = unpack_words(words, 4).view(words.shape[0], -1, 8)
    return fields[..., _FIELDS].flatten(1).t().contiguous()
