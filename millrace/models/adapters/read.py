"""Reads an adapter's matrices into host memory. Everything about it is checked here, before a device sees it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from millrace.errors import AdapterError
from millrace.models.adapters.config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig, read_config
from millrace.models.adapters.targets import AdapterTargets
from millrace.ops.lora.weights import LinearLora, LoraPart, join, pack

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_OTHERS = (
    ("lora_magnitude_vector", "DoRA's magnitudes"),
    ("lora_embedding", "LoRA matrices of an embedding"),
    ("modules_to_save", "whole modules (modules_to_save)"),
    ("embed_tokens", "an embedding"),
    ("lm_head", "an LM head"),
    (".experts", "LoRA matrices of experts"),
    ("bias", "biases"),
)
"""What a tensor that is no LoRA matrix of a linear may be: (part of its name, what it is)."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Validated matrices in host memory, in the model's dtype."""

    data: Tensor
    """All matrices, one after the other."""
    linears: dict[int, LinearLora]
    """Parts of `data`, by index of the linear, see `AdapterTargets`."""
    max_rank: int
    digest: str
    """Of the files: names the adapter's content."""
    base_model: str
    folder: Path

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def on(self, data: Tensor) -> Adapter:
        """The same adapter in a copy of its matrices."""
        return replace(self, data=data, linears={index: lora.within(data) for index, lora in self.linears.items()})

    def to(self, device: torch.device) -> Adapter:
        return self if self.data.device == device else self.on(self.data.to(device))


def read_adapter(
    folder: Path,
    targets: AdapterTargets,
    dtype: torch.dtype,
    *,
    max_rank: int,
    max_bytes: int,
    is_pinned: bool = False,
) -> Adapter:
    """Raises AdapterError with the file, the tensor and the remedy. Nothing of the adapter is kept then. `is_pinned`:
    in memory that a GPU copies from beside its steps."""
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
        size = path.stat().st_size
        if size > max_bytes:
            raise AdapterError(f"{path} has {size:,} bytes; at most {max_bytes:,} are read. Raise --adapter-memory.")
        # Read, not mapped: a file that is cut while it is mapped would end the process.
        with path.open("rb") as file:
            data = file.read(size)
        tensors = load(data)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read as safetensors: {error}") from error
    digest.update(data)
    reading = _Reading(path, tensors, config, targets, dtype, max_rank)
    linears = reading.linears()
    rank = max(max(linear.ranks) for linear in linears.values())
    joined, placed = join(linears, is_pinned=is_pinned)
    # At once: a call for each tensor keeps the engine's threads waiting for as long as reading takes.
    if not bool(torch.isfinite(joined).all()):
        raise reading.not_finite()
    return Adapter(joined, placed, rank, digest.hexdigest(), config.base_model, folder)


class _Reading:
    def __init__(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        config: AdapterConfig,
        targets: AdapterTargets,
        dtype: torch.dtype,
        max_rank: int,
    ) -> None:
        self._path, self._tensors, self._config, self._targets = path, tensors, config, targets
        self._dtype, self._max_rank = dtype, max_rank

    def linears(self) -> dict[int, LinearLora]:
        found: dict[int, list[LoraPart | None]] = {}
        places = self._targets.places()
        for module, keys in self._modules().items():
            if module not in places:
                raise AdapterError(
                    f"{self._path}: {next(iter(keys.values()))} is for a module that this model does not have or whose"
                    f" adapters are not supported: {module}. The adapter belongs to another model"
                    + (f" ({self._config.base_model})." if self._config.base_model else ".")
                )
            index, part = places[module]
            linear = self._targets.linears[index]
            assert linear is not None
            parts = found.setdefault(index, [None] * len(linear.modules))
            parts[part] = self._part(module, keys, linear.in_features, linear.out_sizes[part])
        if not found:
            raise AdapterError(f"{self._path} has no LoRA matrices.")
        return {index: pack(parts) for index, parts in sorted(found.items())}

    def _modules(self) -> dict[str, dict[str, str]]:
        """Module -> {"A": key, "B": key}."""
        modules: dict[str, dict[str, str]] = {}
        for key in self._tensors:
            match = _KEY.fullmatch(key)
            what = next((what for part, what in _OTHERS if part in key), None)
            if match is None or what is not None:
                raise AdapterError(
                    f"{self._path}: tensor {key} is not supported: "
                    + (f"the adapter has {what}." if what else "it is no LoRA matrix of a linear layer.")
                )
            keys = modules.setdefault(match["module"], {})
            if match["which"] in keys:
                raise AdapterError(f"{self._path}: {match['module']} has two matrices lora_{match['which']}.")
            keys[match["which"]] = key
        for module, keys in modules.items():
            if len(keys) < 2:
                missing = "B" if "A" in keys else "A"
                raise AdapterError(f"{self._path}: {module} has no lora_{missing}.weight.")
        return modules

    def _part(self, module: str, keys: dict[str, str], inputs: int, outputs: int) -> LoraPart:
        rank = self._config.rank_of(module)
        shape = self._tensors[keys["A"]].shape
        if len(shape) == 2 and shape[0] > self._max_rank:
            raise AdapterError(
                f"{self._path}: {keys['A']} has rank {shape[0]}; adapters of this server may have at most"
                f" {self._max_rank}. Raise --max-lora-rank (at most 256)."
            )
        a = self._tensor(keys["A"], (rank, inputs))
        b = self._tensor(keys["B"], (outputs, rank))
        return LoraPart(a, b.t().contiguous(), self._config.scale_of(module))

    def _tensor(self, key: str, shape: tuple[int, int]) -> Tensor:
        found = self._tensors[key]
        if tuple(found.shape) != shape:
            raise AdapterError(
                f"{self._path}: {key} has shape {tuple(found.shape)}; this model and the adapter's ranks require"
                f" {shape}. The adapter belongs to another model"
                + (f" ({self._config.base_model})." if self._config.base_model else ".")
            )
        if found.dtype not in _FLOATS:
            kind = str(found.dtype).removeprefix("torch.")
            raise AdapterError(f"{self._path}: {key} has the type {kind}; it must be float16, bfloat16 or wider.")
        return found.to(self._dtype)

    def not_finite(self) -> AdapterError:
        """Names the first tensor that is not."""
        wrong = (name for name, one in self._tensors.items() if not bool(torch.isfinite(one.to(self._dtype)).all()))
        return AdapterError(f"{self._path}: {next(wrong)} has values that are NaN or infinite. The file is damaged.")
