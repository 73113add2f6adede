"""Reads an ONNX file: its nodes and its stored tensors. Only what names weights is decoded; nothing is executed.

The format is Protocol Buffers. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ModelError

_TYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 10: "<f2", 11: "<f8"}
"""NumPy types of TensorProto.DataType."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Node:
    kind: str
    """The operator: MatMul, Gemm, Add."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    transposes_second: bool = False
    """Gemm: its second input is stored as [out, in]."""


@dataclass(slots=True)
class StoredTensor:
    """Where a tensor lies; `read` gives its numbers."""

    name: str = ""
    shape: tuple[int, ...] = ()
    data_type: int = 0
    raw: memoryview | None = None
    """Little-endian; None if the numbers lie in `lists` or in another file."""
    lists: list[memoryview] = field(default_factory=list)
    """Packed numbers of float_data, int32_data or int64_data, which small tensors use."""
    list_type: str = ""
    is_external: bool = False
    place: dict[str, str] = field(default_factory=dict)
    """Of external data: `location`, `offset`, `length`."""


class OnnxFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes: list[Node] = []
        self.tensors: dict[str, StoredTensor] = {}
        try:
            with path.open("rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            for number, value in _fields(content):
                if number == 7:
                    self._read_graph(_part(value))
        except (IndexError, ValueError, OSError) as error:
            raise ModelError(f"{path} is not a readable ONNX file: {error}. Download it again.") from error
        if not self.tensors:
            raise ModelError(f"{path} holds no tensors, so it is no model in ONNX form. Download it again.")

    def read(self, name: str) -> Array:
        stored = self.tensors[name]
        kind = _TYPES.get(stored.data_type)
        if kind is None:
            raise ModelError(
                f"{self.path}: tensor {name} has the ONNX type {stored.data_type}, which is not supported."
            )
        try:
            return self._numbers(stored, kind).reshape(stored.shape)
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: tensor {name} cannot be read: {error}. Download it again.") from error

    def _numbers(self, stored: StoredTensor, kind: str) -> Array:
        if stored.is_external:
            return self._external(stored, kind)
        if stored.raw is not None:
            return np.frombuffer(stored.raw, kind)
        if stored.list_type == "varint":
            values = [_signed(value) for part in stored.lists for value in _varints(part)]
            # Halves are stored as the integers of their bits.
            return np.array(values, np.uint16).view(kind) if kind == "<f2" else np.array(values).astype(kind)
        return np.frombuffer(b"".join(stored.lists), stored.list_type or kind).astype(kind)

    def _external(self, stored: StoredTensor, kind: str) -> Array:
        location = stored.place["location"]
        if Path(location).name != location:
            raise ModelError(f"{self.path} names the file {location!r}, which is outside its directory.")
        path = self.path.parent / location
        if not path.is_file():
            raise ModelError(f"{self.path.parent} has no file {location}, which {self.path.name} names. Download it.")
        count = int(np.prod(stored.shape, dtype=np.int64))
        return np.fromfile(path, kind, count, offset=int(stored.place.get("offset", 0)))

    def _read_graph(self, graph: memoryview) -> None:
        for number, value in _fields(graph):
            if number == 1:
                self.nodes.append(_node(_part(value)))
            elif number == 5:
                tensor = _tensor(_part(value))
                self.tensors[tensor.name] = tensor


def _node(content: memoryview) -> Node:
    inputs, outputs, texts, transposed = [], [], {3: "", 4: ""}, False
    for number, value in _fields(content):
        if number == 1:
            inputs.append(_text(value))
        elif number == 2:
            outputs.append(_text(value))
        elif number in texts:
            texts[number] = _text(value)
        elif number == 5:
            attribute = dict(_fields(_part(value)))
            if _text(attribute.get(1, memoryview(b""))) == "transB":
                transposed = bool(attribute.get(3, 0))
    return Node(texts[4], texts[3], tuple(inputs), tuple(outputs), transposed)


def _tensor(content: memoryview) -> StoredTensor:
    tensor, shape = StoredTensor(), []
    for number, value in _fields(content):
        if number == 1:
            shape += [value] if isinstance(value, int) else list(_varints(value))
        elif number == 2:
            tensor.data_type = _number(value)
        elif number == 8:
            tensor.name = _text(value)
        elif number == 9:
            tensor.raw = _part(value)
        elif number in (4, 5, 7, 10):
            tensor.list_type = {4: "<f4", 10: "<f8"}.get(number, "varint")
            tensor.lists.append(_part(value) if not isinstance(value, int) else memoryview(_varint_bytes(value)))
        elif number == 13:
            entry = dict(_fields(_part(value)))
            tensor.place[_text(entry[1])] = _text(entry[2])
        elif number == 14:
            tensor.is_external = value == _EXTERNAL
    tensor.shape = tuple(shape)
    return tensor


# -- Protocol Buffers ------------------------------------------------------------------------------------------------


def _fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message: an integer, or the bytes of a text, a message or packed numbers."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        size = 8 if kind == _FIXED64 else 4
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif kind not in (_FIXED64, _FIXED32):
            raise ValueError(f"a field has the unknown wire type {kind}")
        if at + size > len(content):
            raise ValueError("the file ends inside a field")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than ten bytes")


def _varints(content: memoryview) -> Iterator[int]:
    at = 0
    while at < len(content):
        value, at = _varint(content, at)
        yield value


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _part(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where a message is expected")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a message stands where a number is expected")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_part(value)).decode("utf-8")
