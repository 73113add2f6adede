"""What a format gives for each matrix: which tensors hold it, how large it is, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.errors import ModelError


class StoredTensors(Protocol):
    """The tensors of a checkpoint as they are stored."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def raw(self, name: str) -> Tensor:
        """On the CPU, in the stored dtype."""
        ...

    def metadata(self) -> Mapping[str, str]:
        """The free text entries of the files' headers."""
        ...

    def file_of(self, name: str) -> Path: ...


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """One matrix [N, K] of a checkpoint that is not stored as plain floats."""

    label: str
    """For people: `AWQ 4-bit, groups of 128`."""
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    """The stored tensors that it consists of, or that describe it."""
    num_bytes: int
    """Size of the weight that `read` returns."""
    read: Callable[[torch.dtype], Any]
    """Reads it for a model's dtype, on the CPU: a GroupedWeight, or a BlockWeight from a GGUF file."""
    gguf: str | None = None
    """The GGUF format with the same values (but for the rounding of scales to float16); None if there is none."""
    has_order: bool = False
    """True if the codes are read in another order than the inputs (act-order)."""
    is_fp8_by_output: bool = False
    """True for FP8 codes with one scale per output, which GPUs multiply as they are."""
    group: int = 32
    """Inputs per scale."""

    @property
    def can_stack(self) -> bool:
        """True if a GPU's kernel for experts reads it."""
        return not self.has_order and self.group % 16 == 0


class CheckpointFormat(Protocol):
    def matrix(self, module: str, shape: tuple[int, int]) -> QuantisedMatrix | None:
        """How the weight [outputs, inputs] of a module is stored; None if as plain floats."""
        ...


Settings = Mapping[str, Any]
"""A `quantization_config`, or a part of it."""


def unsupported(what: str, remedy: str) -> ModelError:
    return ModelError(f"The checkpoint is quantised with {what}, which is not supported. {remedy}")


def check_shape(tensors: StoredTensors, name: str, expected: tuple[int, ...]) -> None:
    found = tensors.shape(name)
    if found != expected:
        raise ModelError(
            f"{tensors.file_of(name)}: tensor {name} has shape {found}; its quantization_config requires {expected}."
            " The config and the weights belong to different models; download both again."
        )


def items(shape: Iterable[int]) -> int:
    return math.prod(shape)


def gguf_of(bits: int, group: int, inputs: int, *, zero: int = 0, has_zeros: bool = False) -> str | None:
    """The GGUF format for integer codes with such groups. GGUF blocks are 32 inputs of one output."""
    if inputs % 32 or (group % 32 and group < inputs):
        return None
    if bits == 4:
        return "Q4_1" if has_zeros else "Q4_0" if zero == 8 else None
    return None if has_zeros else "Q8_0"


# --- packed codes ---


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] to uint8 [..., n * 32 / bits], the lowest bits first."""
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    return unpack_nibbles(words.contiguous().view(torch.uint8))


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] to [..., 2 n], low halves first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, K] as `GroupedWeight.codes`."""
    if bits == 8:
        return codes.contiguous()
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


# --- rules per module ---


def is_named(module: str, names: Iterable[str] | None) -> bool:
    """True if the module, or a module that contains it, is among the names (`lm_head`, `model.layers.0.mlp`)."""
    parts = module.split(".")
    return any(f".{name}." in f".{module}." or name in parts for name in names or ())
