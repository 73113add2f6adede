"""Random weights in a quantised format, for benchmarks in which only sizes matter: a config's `weight_format` names it.

Formats of GGUF files (`Q4_K`) have random blocks; those of checkpoints (`awq`) random tensors, which the format's own
reader reads. Embeddings and heads are quantised in the former only, as in files that people have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import ModelLayout, layout_of, matrices_of
from millrace.models.weights.random_weights import RandomWeights
from millrace.sources.resolve import RANDOM_FORMAT

HALVES: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Offsets of the float16 numbers in a block of GGUF's formats."""
_GROUP: Final = 128
_BY_OUTPUT: Final = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_BY_32: Final = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def _compressed(kind: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


_SETTINGS: Final[Mapping[str, dict[str, Any]]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False},
    "fp8": {"quant_method": "fp8"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [_GROUP, _GROUP]},
    "int8": _compressed("int-quantized", _BY_OUTPUT, {"num_bits": 8, "type": "int", "symmetric": True}),
    "mxfp4": _compressed("mxfp4-pack-quantized", _BY_32),
}
FORMATS: Final = (*_SETTINGS, *HALVES)

Sizes = tuple[int, ...]
Stored = Mapping[str, tuple[Sizes, torch.dtype]]


def _stored(kind: str, outputs: int, inputs: int) -> Stored:
    """Ends of names, shapes and dtypes of a module's tensors."""
    int32, half, single, fp8 = torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn
    groups = -(-inputs // _GROUP)
    if kind == "awq":
        packed = outputs // 8
        return {
            "qweight": ((inputs, packed), int32),
            "qzeros": ((groups, packed), int32),
            "scales": ((groups, outputs), half),
        }
    if kind == "gptq":
        return {"qweight": ((inputs // 8, outputs), int32), "scales": ((groups, outputs), half)}
    if kind == "fp8":
        return {"weight": ((outputs, inputs), fp8), "weight_scale": ((1,), single)}
    if kind == "fp8-block":
        return {"weight": ((outputs, inputs), fp8), "weight_scale_inv": ((-(-outputs // _GROUP), groups), single)}
    if kind == "int8":
        return {"weight": ((outputs, inputs), torch.int8), "weight_scale": ((outputs, 1), single)}
    packed_sizes, scales = (outputs, inputs // 2), (outputs, inputs // 32)
    return {"weight_packed": (packed_sizes, torch.uint8), "weight_scale": (scales, torch.uint8)}


def _bytes(name: str, seed: int, count: int) -> npt.NDArray[np.uint8]:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    draw = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
    return draw.integers(0, 2**64, size=-(-count // 8), dtype=np.uint64).view(np.uint8)[:count]


class RandomTensors:
    """The stored tensors of a checkpoint: those of its matrices, and plain ones."""

    def __init__(self, path: Path, config: dict[str, Any], seed: int, kind: str) -> None:
        self._plain, self._path, self._seed = RandomWeights(path, config, seed), path, seed
        layout = layout_of(spec_from_config(config))
        self.settings = _SETTINGS[kind]
        self._stored: dict[str, tuple[Sizes, torch.dtype]] = {}
        matrices = {part.name for layer in layout.layers for matrix in matrices_of(layer) for part in matrix.parts}
        for name in matrices:
            outputs, inputs = self._plain.shape(name)
            module = name.removesuffix(".weight")
            self._stored |= {f"{module}.{end}": how for end, how in _stored(kind, outputs, inputs).items()}
        self._names = (set(self._plain.names()) - matrices) | self._stored.keys()

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name][0] if name in self._stored else self._plain.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name][1] if name in self._stored else torch.bfloat16

    def metadata(self) -> Mapping[str, str]:
        return {}

    def file_of(self, name: str) -> Path:
        return self._path

    def raw(self, name: str) -> Tensor:
        if name not in self._stored:
            return self._plain.get(name)
        shape, dtype = self._stored[name]
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.full(shape, 0.002, dtype=dtype)
        count = int(np.prod(shape)) * dtype.itemsize
        if name.endswith("_scale"):
            return torch.full(shape, 119, dtype=dtype)  # 2^-8 as an exponent
        drawn = _bytes(name, self._seed, count)
        if dtype.itemsize == 1 and dtype.is_floating_point:
            drawn &= 0xBF  # no NaN
        return torch.from_numpy(drawn).view(dtype).view(shape)

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._plain.get(name, device=device, dtype=dtype)

    def stored_label(self, name: str) -> str:
        return str(self.dtype(name)).removeprefix("torch.")

    def stored_bytes(self, name: str) -> int:
        return int(np.prod(self.shape(name))) * self.dtype(name).itemsize


class RandomBlocks:
    """A QuantisedSource: matrices as blocks of a GGUF format where it divides their rows."""

    def __init__(self, path: Path, config: dict[str, Any], seed: int, kind: str) -> None:
        import gguf  # slow to import

        self._plain, self._path, self._seed, self._kind = RandomWeights(path, config, seed), path, seed, kind
        self._items, self._size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        self._quantised = _quantised_names(layout_of(spec_from_config(config)), self._items)

    def names(self) -> Iterable[str]:
        return self._plain.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(name)

    def file_of(self, name: str) -> Path:
        return self._path

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return self._plain.get(name, device=device, dtype=dtype)

    def stored_format(self, name: str) -> str | None:
        return self._kind if name in self._quantised else None

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]:
        rows = self.shape(name)[0]
        blocks = _bytes(name, self._seed, self.stored_bytes(name)).reshape(-1, self._size)
        for start in HALVES[self._kind]:
            blocks[:, start : start + 2] = np.array([2e-4], dtype=np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)

    def stored_label(self, name: str) -> str:
        return self.stored_format(name) or "bfloat16"

    def stored_bytes(self, name: str) -> int:
        count = int(np.prod(self.shape(name)))
        return count // self._items * self._size if name in self._quantised else 2 * count


def _quantised_names(layout: ModelLayout, items: int) -> set[str]:
    parts = [part for layer in layout.layers for matrix in matrices_of(layer) for part in matrix.parts]
    parts.append(layout.embedding)
    if layout.head is not None:
        parts += layout.head.parts
    return {part.name for part in parts if part.shape[1] % items == 0}


def open_random(path: Path, config: dict[str, Any], seed: int) -> RandomWeights | RandomTensors | RandomBlocks:
    kind = config.get(RANDOM_FORMAT)
    if kind is None:
        return RandomWeights(path, config, seed)
    if kind in _SETTINGS:
        return RandomTensors(path, config, seed, kind)
    if kind in HALVES:
        return RandomBlocks(path, config, seed, kind)
    raise ModelError(f"{path}: {RANDOM_FORMAT} is {kind!r}. Use one of {', '.join(FORMATS)}, or leave it out.")
