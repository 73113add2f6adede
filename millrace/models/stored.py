"""Stored weights: the matrices that stay in the quantised format of their GGUF file, and a cache of their packed form.

Packing takes a moment, so the packed matrices of a model are kept in one file in the user's cache, which later starts
map into memory. Its header is compared byte for byte with the one that this model and this version would write; on any
difference, also in a damaged or truncated file, the file is written again. Its content is not parsed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from millrace.models.spec.layout import ModelLayout, TensorSpec, matrices_of
from millrace.ops.linear.stored import (
    FORMATS,
    LAYOUT_VERSION,
    Order,
    StoredPart,
    StoredWeight,
    pack_stored,
    packed_bytes,
)

log = logging.getLogger(__name__)

KEPT_FILES: Final = 4
STALE_S: Final = 86_400
"""Age after which an unfinished file counts as abandoned."""
_MAGIC: Final = b"millrace packed\n"
_PAGE: Final = 4096


@runtime_checkable
class QuantisedSource(Protocol):
    """A source of weights that can also return the stored blocks."""

    def stored_format(self, name: str) -> str | None:
        """The GGUF format of a quantised matrix whose blocks can be used unchanged; else None."""
        ...

    def stored_rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The matrix's blocks [rows, bytes], contiguous, in the Hugging Face order of rows."""
        ...

    def file_of(self, name: str) -> Path: ...


class KeptMatrices(Protocol):
    """Matrices that are multiplied in a quantised format."""

    def holds(self, parts: tuple[TensorSpec, ...]) -> bool: ...

    def weight(self, parts: tuple[TensorSpec, ...]) -> StoredWeight: ...

    def saved_bytes(self) -> int:
        """Bytes saved compared with the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class PackedRun:
    """Consecutive parts of one matrix with the same format, packed together."""

    format: str
    names: tuple[str, ...]
    rows: int
    columns: int
    num_bytes: int


def packed_runs(parts: Sequence[TensorSpec], source: QuantisedSource) -> tuple[PackedRun, ...]:
    """The runs of a matrix; empty if a part has a format that the kernels do not support."""
    if any(source.stored_format(part.name) not in FORMATS for part in parts):
        return ()
    runs = []
    for kind, group in groupby(parts, key=lambda part: source.stored_format(part.name)):
        own = tuple(group)
        rows, columns = sum(part.shape[0] for part in own), own[0].shape[1]
        assert kind is not None
        runs.append(PackedRun(kind, tuple(part.name for part in own), rows, columns, packed_bytes(kind, rows, columns)))
    return tuple(runs)


def multiplied_parts(layout: ModelLayout) -> Iterator[tuple[TensorSpec, ...]]:
    """The parts of every matrix that the decoder multiplies with or looks rows up in."""
    yield (layout.embedding,)
    for layer in layout.layers:
        for matrix in matrices_of(layer):
            yield matrix.parts
    if layout.head is not None:
        yield layout.head.parts


class StoredMatrices(KeptMatrices):
    """Returns each matrix once, in any order; `close` then saves the newly packed ones for the next start."""

    def __init__(
        self,
        source: QuantisedSource,
        layout: ModelLayout,
        dtype: torch.dtype,
        folder: Path,
        order: Order = "tiles",
        part: str = "",
    ) -> None:
        """`part`: which part of the model the source has; empty if all."""
        self._source, self._dtype, self._folder, self._order, self._part = source, dtype, folder, order, part
        self._runs = {parts: runs for parts in multiplied_parts(layout) if (runs := packed_runs(parts, source))}
        self._file: _PackedFile | None = None

    def holds(self, parts: tuple[TensorSpec, ...]) -> bool:
        return parts in self._runs

    def saved_bytes(self) -> int:
        return sum(run.rows * run.columns * self._dtype.itemsize - run.num_bytes for run in self._all_runs())

    def _all_runs(self) -> list[PackedRun]:
        return [run for runs in self._runs.values() for run in runs]

    def weight(self, parts: tuple[TensorSpec, ...]) -> StoredWeight:
        if self._file is None:
            runs = self._all_runs()
            files = {self._source.file_of(name) for run in runs for name in run.names}
            self._file = _PackedFile(self._folder, runs, sorted(files), self._order, self._part)
        own = self._runs[parts]
        stored = tuple(StoredPart(run.format, run.rows, self._packed(run, self._file)) for run in own)
        return StoredWeight(stored, own[0].columns, self._dtype, self._order)

    def _packed(self, run: PackedRun, file: _PackedFile) -> torch.Tensor:
        found = file.find(run)
        if found is not None:
            return found
        blocks = [self._source.stored_rows(name) for name in run.names]
        joined = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        packed = pack_stored(run.format, joined, run.rows, run.columns, self._order)
        file.put(run, packed)
        return packed

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _PackedFile:
    """The packed runs of one model in one file: read if it is valid, else written to a new file that replaces it."""

    def __init__(
        self, folder: Path, runs: Sequence[PackedRun], sources: Sequence[Path], order: Order, part: str = ""
    ) -> None:
        self._header, self._offsets, self._size = _file_layout(runs, sources, order, part)
        self._path = folder / f"{hashlib.sha256(self._header).hexdigest()[:24]}.packed"
        self._map = self._open() if runs else None
        self._writer: Any = None
        self._missing = {run.names[0] for run in runs}
        if runs and self._map is None:
            self._begin()

    def find(self, run: PackedRun) -> torch.Tensor | None:
        if self._map is None:
            return None
        return torch.frombuffer(self._map, dtype=torch.uint8, count=run.num_bytes, offset=self._offsets[run.names[0]])

    def put(self, run: PackedRun, packed: torch.Tensor) -> None:
        if self._writer is None:
            return
        try:
            self._writer.seek(self._offsets[run.names[0]])
            self._writer.write(packed.numpy().data)
            self._missing.discard(run.names[0])
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Keep the new file if it is complete."""
        if self._writer is None:
            return
        try:
            if not self._missing:
                self._writer.truncate(self._size)
                self._writer.seek(0)
                self._writer.write(self._header)
                self._writer.flush()
                os.fsync(self._writer.fileno())
                os.replace(self._writer.name, self._path)
                _prune(self._path.parent)
        except OSError as error:
            self._give_up(error)
        finally:
            self._discard()

    def _open(self) -> mmap.mmap | None:
        """Map the file copy-on-write; None if its header or size is not the expected one."""
        try:
            with self._path.open("rb") as handle:
                same = handle.read(len(self._header)) == self._header
                if not same or os.fstat(handle.fileno()).st_size != self._size:
                    return None
                os.utime(self._path)
                return mmap.mmap(handle.fileno(), self._size, access=mmap.ACCESS_COPY)
        except OSError:
            return None

    def _begin(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = tempfile.NamedTemporaryFile(dir=self._path.parent, suffix=".tmp", delete=False)  # noqa: SIM115
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("packed weights cannot be saved in %s; each start packs them again: %s", self._path.parent, error)
        self._discard()

    def _discard(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()
            Path(writer.name).unlink(missing_ok=True)


def _file_layout(
    runs: Sequence[PackedRun], sources: Sequence[Path], order: Order, part: str
) -> tuple[bytes, dict[str, int], int]:
    """(header, offset of each run, file size). Source files are identified by path, size and modification time."""
    identity = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    table = [(*run.names, run.format, run.rows, run.columns, run.num_bytes) for run in runs]
    content = {"layout": LAYOUT_VERSION, "order": order, "files": identity, "runs": table}
    text = json.dumps(content | ({"part": part} if part else {})).encode()
    header = _MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    offsets, end = {}, len(header)
    for run in runs:
        offsets[run.names[0]] = start = -(-end // _PAGE) * _PAGE
        end = start + run.num_bytes
    return header, offsets, end


def _prune(folder: Path) -> None:
    """Delete all but the most recently used files, and abandoned unfinished ones."""
    found = sorted(folder.glob("*.packed"), key=lambda path: path.stat().st_mtime, reverse=True)
    abandoned = [path for path in folder.glob("*.tmp") if path.stat().st_mtime < time.time() - STALE_S]
    for path in (*found[KEPT_FILES:], *abandoned):
        path.unlink(missing_ok=True)
