"""Reads the metadata and tensor table of an untrusted GGUF file through a memory map.

Every count, length and offset is checked against the remaining bytes before anything is read or allocated. A truncated
or hostile file raises a `ModelError` with the position, in time proportional to the size of its header.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from millrace.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ARRAY_ITEMS = 1 << 24
"""Limits the memory for a hostile array. More than sixty times the largest known vocabulary."""
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SCALAR_FORMATS = {kind: struct.Struct("<" + code) for kind, code in zip(_SCALARS, "BbHhIifBQqd", strict=True)}
_LENGTH = struct.Struct("<Q")
_MIN_BYTES = {_STRING: 8, _ARRAY: 12} | {kind: dtype.itemsize for kind, dtype in _SCALARS.items()}
_MIN_PAIR_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """In NumPy's order: the last axis is contiguous (and quantised in blocks)."""
    type: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GgufFile:
    """An open GGUF file: metadata as Python values, the tensor table, and views of the tensors' bytes."""

    def __init__(self, path: Path, buffer: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._buffer = buffer

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored: a read-only view of the memory map."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor '{name}'. Download the file again.")
        return np.frombuffer(self._buffer, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)


def read_gguf(path: Path) -> GgufFile:
    """Open and check a little-endian GGUF file of version 2 or 3."""
    try:
        with path.open("rb") as handle:
            buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(f"There is no file {path}. Check the path.") from error
    except ValueError as error:
        raise ModelError(f"{path} is empty, not a GGUF file. Download it again.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be opened: {error}.") from error
    reader = _Reader(path, buffer)
    num_tensors, num_pairs = _read_header(reader)
    metadata = _read_metadata(reader, num_pairs)
    tensors = _read_tensors(reader, num_tensors, _alignment(reader, metadata))
    return GgufFile(path, buffer, metadata, tensors)


class _Reader:
    """Cursor over the memory map. Every read is checked against the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.size, self.at = path, buffer, len(buffer), 0

    def fail(self, what: str) -> NoReturn:
        raise ModelError(
            f"{self.path} is not a valid GGUF file: {what}. It is damaged or incomplete; download it again."
        )

    def take(self, count: int, what: str) -> int:
        """Move past `count` bytes and return where they start."""
        start = self.at
        if count > self.size - start:
            self.fail(f"{what} at byte {start} needs {count} bytes, but {self.size - start} are left")
        self.at = start + count
        return start

    def scalar(self, kind: int, what: str) -> Any:
        form = _SCALAR_FORMATS[kind]
        return form.unpack_from(self.buffer, self.take(form.size, what))[0]

    def u32(self, what: str) -> int:
        return int(self.scalar(4, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(10, what))

    def text(self, what: str, max_bytes: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if max_bytes is not None and length > max_bytes:
            self.fail(f"{what} claims {length} bytes, above the limit of {max_bytes}")
        start = self.take(length, what)
        return self.decode(self.buffer[start : start + length], what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def count(self, kind: int, what: str) -> int:
        """Length of an array. Fails if even items of minimal size would not fit in the remaining bytes."""
        count = self.u64(f"the count of {what}")
        if count > MAX_ARRAY_ITEMS or count * _MIN_BYTES[kind] > self.size - self.at:
            self.fail(f"{what} claims {count} items with {self.size - self.at} bytes left")
        return count


def _read_header(reader: _Reader) -> tuple[int, int]:
    magic = reader.buffer[:4]
    if magic != MAGIC:
        reader.fail(f"it begins with {magic!r} instead of {MAGIC!r}")
    reader.take(4, "the magic")
    version = reader.u32("the version")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ModelError(
            f"{reader.path} is a big-endian GGUF file; only little-endian files are supported. Convert it."
        )
    if version not in VERSIONS:
        raise ModelError(
            f"{reader.path} has GGUF version {version}; versions 2 and 3 are supported."
            " Convert the model again with a current converter."
        )
    num_tensors, num_pairs = reader.u64("the tensor count"), reader.u64("the metadata count")
    if num_tensors * _MIN_TENSOR_BYTES + num_pairs * _MIN_PAIR_BYTES > reader.size:
        reader.fail(f"it claims {num_tensors} tensors and {num_pairs} metadata entries in {reader.size} bytes")
    return num_tensors, num_pairs


def _read_metadata(reader: _Reader, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_pairs):
        key = reader.text(f"metadata key {index}", MAX_NAME_BYTES)
        if key in metadata:
            reader.fail(f"metadata key '{key}' appears twice")
        metadata[key] = _read_value(reader, reader.u32(f"the type of '{key}'"), f"'{key}'", depth=0)
    return metadata


def _read_value(reader: _Reader, kind: int, what: str, depth: int) -> Any:
    if kind == _STRING:
        return reader.text(what)
    if kind == _ARRAY:
        if depth == MAX_ARRAY_DEPTH:
            reader.fail(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        return _read_array(reader, what, depth)
    if kind not in _SCALARS:
        reader.fail(f"{what} has unknown type {kind}")
    value = reader.scalar(kind, what)
    return bool(value) if kind == _BOOL else value


def _read_array(reader: _Reader, what: str, depth: int) -> list[Any]:
    kind = reader.u32(f"the item type of {what}")
    if kind not in _MIN_BYTES:
        reader.fail(f"{what} has items of unknown type {kind}")
    count = reader.count(kind, what)
    if kind == _STRING:
        return _read_strings(reader, count, what)
    if kind == _ARRAY:
        return [_read_value(reader, _ARRAY, what, depth + 1) for _ in range(count)]
    dtype = _SCALARS[kind]
    start = reader.take(count * dtype.itemsize, what)
    values = np.frombuffer(reader.buffer, dtype=dtype, count=count, offset=start)
    return list((values != 0).tolist() if kind == _BOOL else values.tolist())


def _read_strings(reader: _Reader, count: int, what: str) -> list[str]:
    """The cursor is a local variable for speed: vocabularies have hundreds of thousands of strings."""
    buffer, size, at = reader.buffer, reader.size, reader.at
    unpack: Callable[[mmap.mmap, int], tuple[int]] = _LENGTH.unpack_from
    strings: list[str] = []
    append = strings.append
    try:
        for _ in range(count):
            start = at + 8
            at = start + unpack(buffer, at)[0]
            if at > size:
                reader.fail(f"item {len(strings)} of {what} runs past the end of the file")
            append(buffer[start:at].decode("utf-8"))
    except struct.error:
        reader.fail(f"{what} ends after {len(strings)} of {count} items")
    except UnicodeDecodeError:
        reader.fail(f"item {len(strings)} of {what} is not UTF-8")
    reader.at = at
    return strings


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        reader.fail(f"general.alignment is {value!r}, not a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensors(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    entries = [_read_tensor_entry(reader, index) for index in range(num_tensors)]
    data_start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, relative in entries:
        if name in tensors:
            reader.fail(f"tensor '{name}' appears twice")
        if relative % alignment:
            reader.fail(f"tensor '{name}' starts at offset {relative}, not a multiple of {alignment}")
        num_bytes = _tensor_bytes(reader, name, shape, kind)
        offset = data_start + relative
        if offset + num_bytes > reader.size:
            reader.fail(f"tensor '{name}' ends at byte {offset + num_bytes} of a file of {reader.size} bytes")
        tensors[name] = GgufTensor(name, shape, kind, offset, num_bytes)
    return tensors


def _read_tensor_entry(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    from gguf import GGMLQuantizationType  # Slow to import, and a front reads no GGUF file.

    name = reader.text(f"the name of tensor {index}", MAX_NAME_BYTES)
    num_dims = reader.u32(f"the number of dimensions of '{name}'")
    if not 1 <= num_dims <= MAX_DIMS:
        reader.fail(f"tensor '{name}' has {num_dims} dimensions; 1 to {MAX_DIMS} are supported")
    dims = [reader.u64(f"a dimension of '{name}'") for _ in range(num_dims)]
    if 0 in dims:
        reader.fail(f"tensor '{name}' has a dimension of 0")
    number = reader.u32(f"the type of '{name}'")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(
            f"{reader.path}: tensor '{name}' has type {number}, which the installed gguf package does not support."
            " Use a file with another quantisation, or a newer gguf package."
        ) from None
    return name, tuple(reversed(dims)), kind, reader.u64(f"the offset of '{name}'")


def _tensor_bytes(reader: _Reader, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    from gguf import GGML_QUANT_SIZES

    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_items:
        reader.fail(f"tensor '{name}' has rows of {shape[-1]} items, not a multiple of {kind.name}'s {block_items}")
    num_items = 1
    for size in shape:
        num_items *= size
    return num_items // block_items * block_bytes
