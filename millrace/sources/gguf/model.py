"""A GGUF model in one file or split into several (`name-00001-of-00003.gguf`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ModelError
from millrace.sources.gguf.reader import GgufFile, GgufTensor, read_gguf

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufModel:
    """Metadata of the first file and tensors of all files."""

    def __init__(self, files: tuple[GgufFile, ...]) -> None:
        self.files = files
        self._file_by_tensor = {name: file for file in files for name in file.tensors}
        if len(self._file_by_tensor) != sum(len(file.tensors) for file in files):
            names = ", ".join(str(file.path) for file in files)
            raise ModelError(f"The same tensor name appears in more than one of {names}. Download all parts again.")

    @property
    def path(self) -> Path:
        return self.files[0].path

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.files[0].metadata

    def __contains__(self, name: str) -> bool:
        return name in self._file_by_tensor

    def names(self) -> list[str]:
        return list(self._file_by_tensor)

    def tensor(self, name: str) -> GgufTensor:
        return self.file_of(name).tensors[name]

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return self.file_of(name).data(name)

    def file_of(self, name: str) -> GgufFile:
        file = self._file_by_tensor.get(name)
        if file is None:
            raise ModelError(f"{self.path} has no tensor '{name}'. Download the file again.")
        return file


def open_gguf_model(path: Path) -> GgufModel:
    """Open a file and, if it is the first part of a split model, the other parts in the same directory."""
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return GgufModel((first,))
    return GgufModel((first, *(read_gguf(other) for other in _others(first, count))))


def _others(first: GgufFile, count: object) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(first.path.name)
    if match is None or not isinstance(count, int) or int(match["count"]) != count:
        raise ModelError(
            f"{first.path} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf."
            " Restore the names of the parts, or merge them into one file."
        )
    if int(match["index"]) != 1:
        raise ModelError(
            f"{first.path} is part {int(match['index'])} of {count}; give the first part,"
            f" {match['stem']}-00001-of-{count:05}.gguf."
        )
    paths = [first.path.with_name(f"{match['stem']}-{index:05}-of-{count:05}.gguf") for index in range(2, count + 1)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"{first.path} is split into {count} parts, but {shown} is missing in its directory. Download every part."
        )
    return paths
