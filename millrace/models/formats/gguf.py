"""GGUF files on a GPU: the blocks of each format as a weight that the GPU's kernels read.

Q4_0, Q4_1, Q8_0, IQ4_NL and MXFP4 are codes with a scale per 32 inputs, as other quantised checkpoints have them, and
take as many bytes when rewritten. The ternary numbers of TQ1_0 and TQ2_0 become Q2_K, a quarter larger than TQ2_0. The
other formats stay as the file's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.models.formats.base import QuantisedMatrix, pack_codes
from millrace.models.formats.fp4 import E2M1
from millrace.models.spec.layout import ModelLayout, all_tensors
from millrace.ops.linear.block_weight import BlockWeight
from millrace.ops.linear.grouped_weight import GroupedWeight
from millrace.ops.linear.stored import as_kernels_read

TERNARY: Final = ("TQ1_0", "TQ2_0")
KINDS: Final = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", *TERNARY),
)
"""The formats that the GPU's kernels read: the keys of `ops/triton/blocks/decode.py`, MXFP4, and those of
TERNARY, rewritten."""
_BLOCK: Final = 32


class BlockSource(Protocol):
    """A source of weights that can also return stored blocks."""

    def stored_format(self, name: str) -> str | None: ...

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]: ...

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor: ...


class GgufMatrices:
    """A GroupedSource over a source of GGUF blocks."""

    def __init__(self, source: BlockSource, layout: ModelLayout) -> None:
        self._source = source
        self._matrices: dict[str, QuantisedMatrix] = {}
        for part in all_tensors(layout):
            kind = source.stored_format(part.name) if len(part.shape) == 2 else None
            if kind in KINDS and kind is not None:
                shape = (part.shape[0], part.shape[1])
                items, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType["Q2_K" if kind in TERNARY else kind]]
                self._matrices[part.name] = QuantisedMatrix(
                    label=kind,
                    shape=shape,
                    tensors=(part.name,),
                    num_bytes=shape[0] * shape[1] // items * size,
                    read=partial(self._read, part.name, kind, shape[1]),
                )

    def matrices(self) -> Mapping[str, QuantisedMatrix]:
        return self._matrices

    def grouped(self, name: str, dtype: torch.dtype) -> GroupedWeight | BlockWeight:
        weight: GroupedWeight | BlockWeight = self._matrices[name].read(dtype)
        return weight

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._source.get(name, device=device, dtype=dtype)

    def _read(self, name: str, kind: str, inputs: int, dtype: torch.dtype) -> GroupedWeight | BlockWeight:
        return weight_of_blocks(kind, torch.from_numpy(self._source.stored_rows(name).copy()), inputs, dtype)


def weight_of_blocks(kind: str, rows: Tensor, inputs: int, dtype: torch.dtype) -> GroupedWeight | BlockWeight:
    """uint8 [N, bytes] of a file as a weight with the same numbers and, but for TERNARY, as many bytes."""
    if kind == "MXFP4":
        return _mxfp4(rows, inputs, dtype)
    if kind in TERNARY:
        return BlockWeight("Q2_K", torch.from_numpy(as_kernels_read(kind, rows.numpy())), inputs, dtype)
    if kind not in ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL"):
        return BlockWeight(kind, rows, inputs, dtype)
    outputs = rows.shape[0]
    blocks = rows.view(outputs, inputs // _BLOCK, -1)
    head = 4 if kind == "Q4_1" else 2
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    packed = blocks[..., head:]
    if kind == "Q8_0":
        return GroupedWeight(packed.reshape(outputs, inputs).view(torch.int8), scales, inputs, _BLOCK, dtype)
    codes = torch.cat((packed & 15, packed >> 4), dim=2).view(outputs, inputs)
    return GroupedWeight(
        codes=pack_codes(codes, 4),
        scales=scales,
        in_features=inputs,
        group=_BLOCK,
        dtype=dtype,
        zero=8 if kind == "Q4_0" else 0,
        levels=torch.tensor(gguf.quants.IQ4_NL.kvalues, dtype=torch.float32) if kind == "IQ4_NL" else None,
        offsets=blocks[..., 2:4].contiguous().view(torch.float16).squeeze(2) if kind == "Q4_1" else None,
    )


def _mxfp4(rows: Tensor, inputs: int, dtype: torch.dtype) -> GroupedWeight:
    blocks = rows.view(rows.shape[0], inputs // _BLOCK, -1)
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=2).view(rows.shape[0], inputs)
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return GroupedWeight(pack_codes(codes, 4), scales, inputs, _BLOCK, dtype, levels=torch.tensor(E2M1))
