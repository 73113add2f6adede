"""Adds an adapter to its model's weights: a directory that needs no adapter any more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from millrace.errors import AdapterError, ConfigError
from millrace.models.adapters.config import MAX_RANK
from millrace.models.adapters.files import read_magnitudes
from millrace.models.adapters.read import read_adapter
from millrace.models.adapters.targets import targets_of
from millrace.models.load import is_quantised
from millrace.models.spec.families import spec_from_config
from millrace.models.weights import open_weights
from millrace.sources.resolve import resolve_model
from millrace.training.options import Reporter

MAX_FILE_BYTES = 4 << 30
MAX_ADAPTER_BYTES = 16 << 30
_COPIED = (".json", ".jinja", ".model", ".txt")
"""Endings of the files beside the weights."""
_INDEX = "model.safetensors.index.json"


def merge(source: str, adapter: Path, output: Path, report: Reporter, *, offline: bool = False) -> int:
    """W + scale · B A for each target, with DoRA each row brought to its length; computed in float32 and stored in the
    model's own type. Returns the bytes."""
    files = resolve_model(source, offline=offline)
    if files.kind != "safetensors" or is_quantised(files):
        raise ConfigError(
            f"{source} is {'quantised' if is_quantised(files) else files.kind}; an adapter is merged into the"
            " unquantised checkpoint. Merge it there and quantise the result, or serve it with --adapters.",
            param="source",
        )
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; give another --output.", param="output")
    added = _products(files.config, adapter)
    weights, names = open_weights(files), sorted(open_weights(files).names())
    output.mkdir(parents=True, exist_ok=True)
    report.stage("merging", len(names))
    writer = _Writer(output)
    for name in names:
        tensor = weights.get(name)
        product = added.pop(name, None)
        if product is not None:
            tensor = product.added_to(tensor.float()).to(tensor.dtype)
        writer.add(name, tensor.contiguous())
        report.advance(1)
    assert not added, f"targets without weights: {sorted(added)}"
    for file in files.path.iterdir():
        if file.suffix in _COPIED and file.name != _INDEX:
            shutil.copy(file, output / file.name)
    return writer.finish()


class _Product:
    def __init__(self, a: Tensor, b: Tensor, scale: float, lengths: Tensor | None) -> None:
        """`lengths`: DoRA's, of the rows of the result."""
        self._a, self._b, self._scale, self._lengths = a, b, scale, lengths

    def added_to(self, weight: Tensor) -> Tensor:
        """`weight`: [outputs, inputs]"""
        total = weight + (self._b.t() @ self._a) * self._scale
        if self._lengths is None:
            return total
        scales: Tensor = self._lengths / torch.linalg.vector_norm(total, dim=1)
        return total * scales[:, None]


def _products(config: dict[str, object], folder: Path) -> dict[str, _Product]:
    """By name of the weight."""
    targets = targets_of(spec_from_config(config))
    limits = {"max_rank": MAX_RANK, "max_bytes": MAX_ADAPTER_BYTES}
    adapter = read_adapter(folder, targets, torch.float32, **limits, allows_dora=True)
    lengths, found = read_magnitudes(folder, targets), {}
    for index, lora in adapter.linears.items():
        linear = targets.linears[index]
        assert linear is not None
        ends = torch.tensor(linear.out_sizes).cumsum(0).tolist()
        for _, end, a, b, scale in lora.parts(linear.in_features, linear.out_sizes):
            module = linear.modules[ends.index(end)]
            own = lengths.get(module)
            if own is None and lengths:
                raise AdapterError(f"{folder}: use_dora is true, but {module} has no lora_magnitude_vector.")
            found[f"{module}.weight"] = _Product(a, b, scale, None if own is None else torch.from_numpy(own.copy()))
    return found


class _Writer:
    """Files of at most MAX_FILE_BYTES, with an index if there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._files: list[tuple[str, ...]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and self._bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._write()
        self._held[name] = tensor
        self._bytes += tensor.nbytes

    def finish(self) -> int:
        self._write()
        count = len(self._files)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = names if count > 1 else ["model.safetensors"]
        for number, name in enumerate(names):
            (self._folder / f"part{number}.unfinished").rename(self._folder / name)
        if count > 1:
            index = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": index}, indent=2)
            (self._folder / _INDEX).write_text(text + "\n", encoding="utf-8")
        return self._total

    def _write(self) -> None:
        save_file(self._held, self._folder / f"part{len(self._files)}.unfinished", metadata={"format": "pt"})
        self._files.append(tuple(self._held))
        self._total += self._bytes
        self._held, self._bytes = {}, 0
