"""The digest of a model's weights, from which `system_fingerprint` is made.

Reading 16 GB to hash it would delay every start. Instead, the digest covers each file's header (names, types, shapes
and metadata) and three samples of every tensor. Files with the same content have the same digest wherever they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from millrace.config import cache_dir
from millrace.errors import ModelError
from millrace.sources.gguf.reader import read_gguf

SAMPLE_BYTES = 4096
"""Read at the start, in the middle and at the end of each tensor."""
ONNX_PIECE_BYTES = 1 << 16
_HEADER_LENGTH = struct.Struct("<Q")

Span = tuple[int, int]
"""First byte of a tensor in its file, and the byte after its last."""


def weights_digest(paths: Iterable[Path]) -> str:
    """Hexadecimal digest over the files in the given order."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(_file_digest(path).encode())
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    """The file's digest, from the cache if the file has not changed since it was computed."""
    path = path.resolve()
    state = path.stat()
    version = f"{state.st_size} {state.st_mtime_ns} {state.st_ino}"
    cached = cache_dir() / "fingerprints" / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    with contextlib.suppress(OSError, ValueError):
        known_version, digest = cached.read_text().split("\n")
        if known_version == version:
            return digest
    digest = computed_digest(path)
    with contextlib.suppress(OSError):  # A cache that cannot be written only costs time.
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{cached.name}.{os.getpid()}")
        partial.write_text(f"{version}\n{digest}")
        partial.replace(cached)
    return digest


def computed_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header_end, tensors = _layout(path, size)
        for start, end in _samples(header_end, tensors):
            digest.update(os.pread(file.fileno(), end - start, start))
    digest.update(str(size).encode())
    return digest.hexdigest()


def _samples(header_end: int, tensors: Iterable[Span]) -> Iterator[Span]:
    yield 0, header_end
    for first, end in sorted(tensors):
        if end - first <= 3 * SAMPLE_BYTES:
            yield first, end
            continue
        middle = (first + end - SAMPLE_BYTES) // 2
        for start in (first, middle, end - SAMPLE_BYTES):
            yield start, start + SAMPLE_BYTES


def _layout(path: Path, size: int) -> tuple[int, list[Span]]:
    if path.suffix == ".gguf":
        return _gguf_layout(path, size)
    if path.suffix == ".onnx":  # Header and tensors are mixed: pieces of one length stand for tensors.
        return 0, [(first, min(first + ONNX_PIECE_BYTES, size)) for first in range(0, size, ONNX_PIECE_BYTES)]
    return _safetensors_layout(path)


def _safetensors_layout(path: Path) -> tuple[int, list[Span]]:
    """End of the header and span of each tensor. The header is JSON; its offsets count from its end."""
    with path.open("rb") as file:
        try:
            (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
            entries = json.loads(file.read(length))
            base = _HEADER_LENGTH.size + length
            offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
            return base, [(base + first, base + end) for first, end in offsets]
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}. Download it again.") from error


def _gguf_layout(path: Path, size: int) -> tuple[int, list[Span]]:
    tensors = [(tensor.offset, tensor.offset + tensor.num_bytes) for tensor in read_gguf(path).tensors.values()]
    return min((first for first, _ in tensors), default=size), tensors
