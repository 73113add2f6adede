"""Weights from an ONNX file, under the names that the model's safetensors file would have.

An export keeps the names of embeddings, norms and biases. Matrices of linears lose theirs and are transposed: their
names follow from the bias that is added to the product, or else from the name of the node. Matrices that were quantised
to 8 bits become floats again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from millrace.errors import ModelError
from millrace.models.weights.onnx_file import Node, OnnxFile

_FUSED_DOMAINS = {
    "Attention": "onnxruntime's fused attention",
    "MultiHeadAttention": "onnxruntime's fused attention",
    "QAttention": "onnxruntime's fused attention",
    "MatMulNBits": "4-bit matrices",
    "SkipLayerNormalization": "onnxruntime's fused norms",
    "EmbedLayerNormalization": "onnxruntime's fused norms",
}
_FOLLOWED = ("Cast", "Mul")
"""What may stand between a product of integers and the addition of its bias: scales."""
_FLOATS = (1, 10, 11)
_BYTES = (2, 3)


@dataclass(frozen=True, slots=True)
class _Stored:
    tensor: str
    """Name in the file; of a quantised one without its ending."""
    is_quantised: bool
    is_transposed: bool
    """Stored as [in, out]."""


class OnnxWeights:
    def __init__(self, path: Path) -> None:
        self._file = OnnxFile(path)
        for node in self._file.nodes:
            if node.kind in _FUSED_DOMAINS:
                raise ModelError(
                    f"{path} holds {_FUSED_DOMAINS[node.kind]} (operator {node.kind}), whose weights have no names."
                    " Give the model's plain export (model.onnx) or its safetensors files."
                )
        self._found = self._named()

    def names(self) -> Iterable[str]:
        return self._found.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._of(name)
        shape = self._file.tensors[stored.tensor + "_quantized" * stored.is_quantised].shape
        return shape[::-1] if stored.is_transposed else shape

    def file_of(self, name: str) -> Path:
        return self._file.path

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        stored = self._of(name)
        values = self._dequantised(stored.tensor) if stored.is_quantised else self._file.read(stored.tensor)
        if stored.is_transposed:
            values = values.T
        # A copy of its own: the file's memory is read-only.
        return torch.from_numpy(np.array(values, order="C")).to(device=device, dtype=dtype)

    def _of(self, name: str) -> _Stored:
        found = self._found.get(name)
        if found is None:
            raise ModelError(f"{self._file.path} has no tensor {name}; it belongs to another model or another export.")
        return found

    def _dequantised(self, name: str) -> np.ndarray:
        values = self._file.read(f"{name}_quantized").astype(np.float32)
        scale = self._file.read(f"{name}_scale").astype(np.float32)
        zero = self._file.read(f"{name}_zero_point").astype(np.float32)
        # One scale for all, or one per column: the last axis.
        return (values - zero) * scale

    def _named(self) -> dict[str, _Stored]:
        tensors = self._file.tensors
        found: dict[str, _Stored] = {}
        for name, tensor in tensors.items():
            base = name.removesuffix("_quantized")
            is_quantised = base != name and f"{base}_scale" in tensors and tensor.data_type in _BYTES
            if (is_quantised or tensor.data_type in _FLOATS) and base.endswith((".weight", ".bias")):
                found[base] = _Stored(base, is_quantised, is_transposed=False)
        consumers = {name: node for node in self._file.nodes for name in node.inputs}
        for node in self._file.nodes:
            if node.kind not in ("MatMul", "MatMulInteger", "Gemm") or node.inputs[1] not in tensors:
                continue
            stored = node.inputs[1]
            base = stored.removesuffix("_quantized")
            name = self._name_of(node, base, consumers)
            if name:
                is_transposed = not (node.kind == "Gemm" and node.transposes_second)
                found[name] = _Stored(base, base != stored, is_transposed)
        return found

    def _name_of(self, node: Node, stored: str, consumers: dict[str, Node]) -> str:
        """The name of the matrix of a product; "" for one of no linear."""
        if stored.endswith(".weight"):
            return stored
        bias = node.inputs[2] if node.kind == "Gemm" and len(node.inputs) > 2 else ""
        after = consumers.get(node.outputs[0])
        while after is not None and after.kind in _FOLLOWED:
            after = consumers.get(after.outputs[0])
        if not bias and after is not None and after.kind == "Add":
            bias = next((name for name in after.inputs if name.endswith(".bias") and name in self._file.tensors), "")
        if bias:
            return bias.removesuffix("bias") + "weight"
        scope = node.name.rpartition("/")[0].strip("/")
        return f"{scope.replace('/', '.')}.weight" if scope else ""
