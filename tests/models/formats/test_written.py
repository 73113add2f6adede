"""Matrices written by the tools that people use: the readers give the weights that those tools give."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from millrace.models.formats.base import QuantisedMatrix
from millrace.models.formats.read import format_of
from millrace.ops.linear.blocks import gguf_blocks
from millrace.ops.linear.gguf_values import dequantise

FILES = sorted((Path(__file__).parent / "written").glob("*.safetensors"))
assert FILES


class WrittenFile:
    """The tensors of one file, as a reader gives them."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.header: dict[str, str] = file.metadata()
        self.path = path

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def raw(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def metadata(self) -> Mapping[str, str]:
        return self.header

    def file_of(self, name: str) -> Path:
        return self.path


def opened(path: Path) -> tuple[QuantisedMatrix, torch.Tensor, WrittenFile]:
    file = WrittenFile(path)
    kind = format_of({"quantization_config": json.loads(file.header["quantization_config"])}, file)
    expected = file.tensors["expected"]
    assert kind is not None
    matrix = kind.matrix("m", (expected.shape[0], expected.shape[1]))
    assert matrix is not None
    return matrix, expected, file


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_weights_equal_the_tools_own(path: Path) -> None:
    matrix, expected, file = opened(path)
    weight = matrix.read(torch.float32)
    torch.testing.assert_close(weight.dequantised(), expected, rtol=1e-6, atol=1e-7)
    assert matrix.num_bytes == weight.num_bytes
    assert set(matrix.tensors) == {name for name in file.tensors if name != "expected"}
    assert weight.num_bytes < expected.numel() * 2, "no wider than plain bfloat16"


@pytest.mark.parametrize("path", [path for path in FILES if opened(path)[0].gguf], ids=lambda path: path.stem)
def test_gguf_blocks_mean_the_same_but_for_scales_in_float16(path: Path) -> None:
    matrix, expected, _ = opened(path)
    assert matrix.gguf is not None
    weight, found = matrix.read(torch.float32), torch.empty_like(expected)
    dequantise(gguf_blocks(weight, matrix.gguf), Kind[matrix.gguf], found)
    if weight.order is not None:
        expected = expected[:, weight.order]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=float(expected.abs().max()) * 1e-3)
