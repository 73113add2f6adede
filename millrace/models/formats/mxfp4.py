"""MXFP4 checkpoints (`quant_method: mxfp4`), gpt-oss's: the experts are 4-bit floats with an exponent per 32 inputs.

The files stack all experts of a layer (`gate_up_proj_blocks`, `_scales`). `weights/safetensors_weights.py` gives each
its own `weight_blocks` uint8 [N, K / 32, 16], even inputs in the low halves, and `weight_scales` uint8 [N, K / 32], the
exponent of two plus 127. Everything else is plain.
"""

from __future__ import annotations

from functools import partial

import torch

from millrace.errors import ModelError
from millrace.models.formats.base import QuantisedMatrix, Settings, StoredTensors, check_shape, is_named, items
from millrace.models.formats.fp4 import E2M1
from millrace.ops.linear.grouped_weight import GroupedWeight

GROUP = 32


class Mxfp4Format:
    def __init__(self, settings: Settings, tensors: StoredTensors) -> None:
        self._tensors, self._names = tensors, frozenset(tensors.names())
        self._plain: tuple[str, ...] = tuple(settings.get("modules_to_not_convert") or ())

    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        blocks, scales = f"{module}.weight_blocks", f"{module}.weight_scales"
        if blocks not in self._names:
            return None
        if scales not in self._names:
            raise ModelError(f"{self._tensors.file_of(blocks)}: tensor {blocks} has no scales. Download it again.")
        if is_named(module, self._plain):
            raise ModelError(
                f"{self._tensors.file_of(blocks)}: tensor {blocks} is MXFP4, but modules_to_not_convert names it."
                " The config and the weights belong to different models; download both again."
            )
        outputs, inputs = shape
        check_shape(self._tensors, blocks, (outputs, inputs // GROUP, GROUP // 2))
        check_shape(self._tensors, scales, (outputs, inputs // GROUP))
        return QuantisedMatrix(
            label=f"MXFP4, groups of {GROUP}",
            shape=shape,
            tensors=(blocks, scales),
            num_bytes=items(shape) // 2 + items(shape) // GROUP,
            read=partial(self._read, blocks, scales, shape),
            gguf="MXFP4",
            group=GROUP,
        )

    def _read(self, blocks: str, scales: str, shape: tuple[int, int], dtype: torch.dtype) -> GroupedWeight:
        return GroupedWeight(
            codes=self._tensors.raw(blocks).view(shape[0], -1),
            scales=self._tensors.raw(scales).view(torch.float8_e8m0fnu),
            in_features=shape[1],
            group=GROUP,
            dtype=dtype,
            levels=torch.tensor(E2M1),
        )
