"""What a model's files say of it without loading it: family, parameters, quantisation, size. Reads headers only."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.sources.gguf.model import open_gguf_model
from millrace.sources.resolve import ModelFiles, resolve_model

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as the format limits it."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    family: str = "unknown"
    format: str = "unknown"
    num_bytes: int = 0
    num_parameters: int = 0
    quantisation: str = ""
    """Type of most weights, such as Q4_K or BF16."""
    modified: float = 0.0
    """Seconds since the epoch."""
    digest: str = ""
    """Changes with the files; not a hash of their content."""


def file_facts(source: str) -> FileFacts:
    """Raises `ModelError` if the model is not on this machine."""
    files = resolve_model(source, offline=True)
    stats = [path.stat() for path in files.weights]
    identity = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in zip(files.weights, stats, strict=True)]
    weights = Counter[str]()
    for kind, count in _tensors(files):
        weights[kind] += count
    return FileFacts(
        family=str(files.config.get("model_type", "unknown")),
        format=files.kind,
        num_bytes=sum(stat.st_size for stat in stats),
        num_parameters=weights.total(),
        quantisation=weights.most_common(1)[0][0] if weights else "",
        modified=max((stat.st_mtime for stat in stats), default=0.0),
        digest=hashlib.sha256(json.dumps([files.name, identity]).encode()).hexdigest(),
    )


def _tensors(files: ModelFiles) -> Iterator[tuple[str, int]]:
    """Type and number of elements of each tensor."""
    if files.kind == "gguf":
        model = open_gguf_model(files.path)
        for name in model.names():
            tensor = model.tensor(name)
            yield tensor.type.name, math.prod(tensor.shape)
    elif files.kind == "safetensors":
        for path in files.weights:
            yield from _safetensors(path)


def _safetensors(path: Path) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else {}
    for name, tensor in header.items():
        if name != "__metadata__":
            yield str(tensor["dtype"]), math.prod(tensor["shape"])
