"""Writes the weights of an encoder as exporters to ONNX do: matrices of linears transposed and under numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file

Style = Literal["scoped", "numbered", "int8"]
"""`scoped`: nodes have names such as /encoder/layer.0/output/dense/MatMul. `numbered`: they have numbers only. `int8`:
matrices and embeddings are quantised."""
_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "float16": 10}


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def tensor(name: str, values: Any, external: tuple[str, int] | None = None) -> bytes:
    head = b"".join(field(1, size) for size in values.shape) + field(2, _TYPES[str(values.dtype)]) + field(8, name)
    if external is None:
        return head + field(9, values.tobytes())
    entries = {"location": external[0], "offset": str(external[1]), "length": str(values.nbytes)}
    return head + b"".join(field(13, field(1, key) + field(2, text)) for key, text in entries.items()) + field(14, 1)


def node(kind: str, name: str, inputs: list[str], output: str, trans_b: bool = False) -> bytes:
    content = b"".join(field(1, one) for one in inputs) + field(2, output) + field(3, name) + field(4, kind)
    return content + (field(5, field(1, "transB") + field(3, 1)) if trans_b else b"")


def model(nodes: list[bytes], tensors: list[bytes]) -> bytes:
    graph = b"".join(field(1, one) for one in nodes) + b"".join(field(5, one) for one in tensors)
    return field(1, 8) + field(2, "pytorch") + field(7, graph)


def quantised(values: Any, axis: int | None) -> tuple[Any, Any, Any]:
    """Integers, scales and zero points: one for all, or one per column."""
    low, high = values.min(axis=axis), values.max(axis=axis)
    scale = ((high - low) / 255).astype(np.float32)
    zero = np.round(-low / scale).clip(0, 255).astype(np.uint8)
    return np.clip(np.round(values / scale) + zero, 0, 255).astype(np.uint8), scale, zero


def write_onnx(folder: Path, style: Style = "scoped", *, external: bool = False) -> None:
    """Replaces the directory's safetensors file by onnx/model.onnx."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    writer = _Writer(folder / "onnx", style, external)
    for number, (name, values) in enumerate(stored.items()):
        is_linear = values.ndim == 2 and "embeddings" not in name and "relative" not in name
        if is_linear:
            writer.linear(name, values, number, f"{name.removesuffix('weight')}bias" in stored)
        else:
            writer.plain(name, values, is_quantised=style == "int8" and "word_embeddings" in name)
    (folder / "onnx" / "model.onnx").write_bytes(model(writer.nodes, writer.tensors))


class _Writer:
    def __init__(self, folder: Path, style: Style, external: bool) -> None:
        self.folder, self.style, self.external = folder, style, external
        self.nodes: list[bytes] = []
        self.tensors: list[bytes] = []

    def plain(self, name: str, values: Any, *, is_quantised: bool = False) -> None:
        if is_quantised:
            parts = zip(("quantized", "scale", "zero_point"), quantised(values, None), strict=True)
            self.tensors += [tensor(f"{name}_{part}", np.asarray(one)) for part, one in parts]
        elif self.external:
            path = self.folder / "model.onnx_data"
            offset = path.stat().st_size if path.exists() else 0
            with path.open("ab") as file:
                file.write(values.tobytes())
            self.tensors.append(tensor(name, values, (path.name, offset)))
        else:
            self.tensors.append(tensor(name, values))

    def linear(self, name: str, values: Any, number: int, has_bias: bool) -> None:
        scope = name.removesuffix(".weight")
        if name.startswith("classifier"):
            self.plain(name, values)
            self.nodes.append(node("Gemm", f"/{scope}/Gemm", ["x", name, f"{scope}.bias"], "logits", trans_b=True))
            return
        matrix, out = f"onnx::MatMul_{number}", f"out_{number}"
        # Scopes are those of the exporter: parts of the name that are no index are separated by slashes.
        label = f"MatMul_{number}" if self.style == "numbered" else "/" + "/".join(_scope(scope)) + "/MatMul"
        transposed = np.ascontiguousarray(values.T)
        if self.style == "int8":
            parts = zip(("quantized", "scale", "zero_point"), quantised(transposed, 0), strict=True)
            self.tensors += [tensor(f"{matrix}_{part}", one) for part, one in parts]
            inputs = ["x", f"{matrix}_quantized", "x_zero_point", f"{matrix}_zero_point"]
            self.nodes.append(node("MatMulInteger", f"{label}_quant", inputs, f"{out}_integers"))
            self.nodes.append(node("Cast", f"{label}_cast", [f"{out}_integers"], f"{out}_floats"))
            self.nodes.append(node("Mul", f"{label}_scaled", [f"{out}_floats", "scales"], out))
        else:
            self.plain(matrix, transposed)
            self.nodes.append(node("MatMul", label, ["x", matrix], out))
        if has_bias:
            self.nodes.append(node("Add", f"Add_{number}", [f"{scope}.bias", out], f"sum_{number}"))


def _scope(name: str) -> list[str]:
    parts: list[str] = []
    for part in name.split("."):
        if part.isdigit():
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts
