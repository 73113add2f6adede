"""Reads an adapter's files and packs its matrices into one array. Everything about it is checked here, before a device
sees it. Without torch: a small process does it beside the engine."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from millrace.errors import AdapterError
from millrace.models.adapters.config import CONFIG_FILE, MERGE, WEIGHTS_FILE, AdapterConfig, read_config
from millrace.models.adapters.targets import AdapterTargets

_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_WRAPPERS = frozenset({"base_model", "model", "language_model", "module", "_orig_mod"})
"""Names of modules around a model's layers, which depend on the class that was trained and on the version of the
library: with a head or without, beside a vision tower or alone, compiled or distributed."""
_TARGETS = "Train it with the linears of attention and MLP as target_modules"
_WHOLE = "If it was not trained (PEFT saves a resized one too), save the adapter with save_embedding_layers=False; else"
_OTHERS = (
    ("lora_magnitude_vector", "DoRA's magnitudes, but no use_dora", "Save it again with PEFT, or"),
    ("lora_embedding", "LoRA matrices of an embedding", f"{_TARGETS}, or"),
    ("modules_to_save", "whole modules (modules_to_save)", "Train it without them, or"),
    ("embed_tokens", "an embedding", _WHOLE),
    ("lm_head.lora_", "LoRA matrices of an LM head", f"{_TARGETS}, or"),
    ("lm_head", "an LM head", _WHOLE),
    (".experts", "LoRA matrices of experts", f"{_TARGETS}, without experts, or"),
    ("bias", "biases", "Train it with bias='none', or"),
)
"""What a tensor that is no LoRA matrix of a linear may be: (part of its name, what it is, a remedy beside merging)."""
ALIGN = 16
"""Matrices begin at multiples of so many numbers."""
BFLOAT16 = "bfloat16"
STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    BFLOAT16: np.dtype(np.uint16),
}
"""By dtype of the model: the type of the array, which for bfloat16 holds its bits."""
_FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": STORED["float32"],
    "F16": STORED["float16"],
    "BF16": STORED[BFLOAT16],
}
_INTEGERS = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_BF16_EXPONENT = 0x7F80


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The matrices of one linear, see `LinearLora`: numbers of the array from `first_a` and from `first_b` on."""

    index: int
    first_a: int
    size_a: int
    first_b: int
    size_b: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    linears: tuple[PackedLinear, ...]
    num_numbers: int
    max_rank: int
    digest: str
    """Of the files: names the adapter's content."""
    base_model: str
    dtype: str
    """Of the array."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_rank: int
    max_bytes: int
    keeps_bfloat16: bool = False
    """Files in bfloat16 stay so where the model is in float32, which halves what a step reads."""
    allows_dora: bool = False
    """For whoever applies `read_magnitudes` too."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Of one part of a linear's outputs."""

    a: str
    b: str
    """Keys of the two matrices."""
    rank: int
    inputs: int
    outputs: int
    scale: float


def read_files(folder: Path, targets: AdapterTargets, dtype: str, limits: Limits) -> tuple[Packed, np.ndarray]:
    """Raises AdapterError with the file, the tensor and the remedy. Nothing of the adapter is kept then."""
    config = read_config(folder, allows_dora=limits.allows_dora)
    path = folder / WEIGHTS_FILE
    try:
        digest = hashlib.blake2b((folder / CONFIG_FILE).read_bytes(), digest_size=32)  # Half of SHA-256's time.
        size = path.stat().st_size
        if size > limits.max_bytes:
            too_large = f"{path} has {size:,} bytes; at most {limits.max_bytes:,} are read. Raise --adapter-memory."
            raise AdapterError(too_large)
        # Read, not mapped: a file that is cut while it is mapped would end the process.
        with path.open("rb") as file:
            data = file.read(size)
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read as safetensors: {error}") from error
    digest.update(data)
    del data
    if config.uses_dora:
        tensors = {key: one for key, one in tensors.items() if _MAGNITUDE.fullmatch(key) is None}
    reading = _Reading(path, tensors, config, targets, limits.max_rank)
    found = reading.parts()
    linears, num_numbers = _placed(found)
    if limits.keeps_bfloat16 and all(one["dtype"] == "BF16" for one in tensors.values()):
        dtype = BFLOAT16
    numbers = np.zeros(num_numbers, STORED[dtype])
    for linear in linears:
        at_a, at_b = linear.first_a, linear.first_b
        for part in found[linear.index]:
            if part is None:
                continue
            end_a, end_b = at_a + part.rank * part.inputs, at_b + part.rank * part.outputs
            numbers[at_a:end_a].reshape(part.rank, part.inputs)[:] = reading.values(part.a, dtype)
            # Transposed, so that outputs are contiguous.
            numbers[at_b:end_b].reshape(part.rank, part.outputs)[:] = reading.values(part.b, dtype).T
            at_a, at_b = end_a, end_b
    if not _is_finite(numbers, dtype):
        raise reading.not_finite(dtype)
    rank = max(max(linear.ranks) for linear in linears)
    return Packed(linears, num_numbers, rank, digest.hexdigest(), config.base_model, dtype), numbers


def read_magnitudes(folder: Path, targets: AdapterTargets) -> dict[str, np.ndarray]:
    """DoRA's lengths of the rows of each changed weight, float32 [outputs], by the name of the target's module; empty
    for an adapter without DoRA. `read_files` has accepted the adapter."""
    if not read_config(folder, allows_dora=True).uses_dora:
        return {}
    path, places = folder / WEIGHTS_FILE, targets.places()
    known = {_inner(module): module for module in places}
    tensors = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    found = {}
    for key, tensor in tensors.items():
        if (match := _MAGNITUDE.fullmatch(key)) is None:
            continue
        module = known.get(_inner(match["module"].removeprefix("base_model.model.")))
        if module is None:
            raise AdapterError(f"{path}: {key} is for a module that this model does not have.")
        index, part = places[module]
        linear = targets.linears[index]
        assert linear is not None
        kind, size = tensor["dtype"], linear.out_sizes[part]
        if kind not in _FLOATS or math.prod(tensor["shape"]) != size:
            raise AdapterError(f"{path}: {key} has {kind} {tuple(tensor['shape'])}; it must be {size} floats.")
        values = np.frombuffer(tensor["data"], _FLOATS[kind])
        found[module] = _converted(values, "float32", is_bfloat16=kind == "BF16")
        if not _is_finite(found[module], "float32"):
            raise AdapterError(f"{path}: {key} has values that are NaN or infinite. The file is damaged.")
    return found


def _placed(found: Mapping[int, list[_Part | None]]) -> tuple[tuple[PackedLinear, ...], int]:
    linears, at = [], 0
    for index, parts in found.items():
        own = [part for part in parts if part is not None]
        size_a, size_b = (sum(part.rank * getattr(part, side) for part in own) for side in ("inputs", "outputs"))
        first_b = at + _aligned(size_a)
        ranks = tuple(0 if part is None else part.rank for part in parts)
        scales = tuple(0.0 if part is None else part.scale for part in parts)
        linears.append(PackedLinear(index, at, size_a, first_b, size_b, ranks, scales))
        at = first_b + _aligned(size_b)
    return tuple(linears), at


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


class _Reading:
    def __init__(
        self, path: Path, tensors: dict[str, Any], config: AdapterConfig, targets: AdapterTargets, max_rank: int
    ) -> None:
        self._path, self._tensors, self._config, self._targets = path, tensors, config, targets
        self._max_rank = max_rank

    def parts(self) -> dict[int, list[_Part | None]]:
        """By index of the linear, in order."""
        found: dict[int, list[_Part | None]] = {}
        places = {_inner(module): place for module, place in self._targets.places().items()}
        for module, keys in self._modules().items():
            if (inner := _inner(module)) not in places:
                raise AdapterError(
                    f"{self._path}: {next(iter(keys.values()))} is for a module that this model does not have or whose"
                    f" adapters are not supported: {module}. The adapter belongs to another model"
                    + (f" ({self._config.base_model})." if self._config.base_model else ".")
                )
            index, part = places[inner]
            linear = self._targets.linears[index]
            assert linear is not None
            parts = found.setdefault(index, [None] * len(linear.modules))
            if parts[part] is not None:
                raise AdapterError(f"{self._path} has two pairs of matrices for {inner}, under names of two models.")
            parts[part] = self._part(module, keys, linear.in_features, linear.out_sizes[part])
        if not found:
            raise AdapterError(f"{self._path} has no LoRA matrices.")
        return dict(sorted(found.items()))

    def _modules(self) -> dict[str, dict[str, str]]:
        """Module -> {"A": key, "B": key}."""
        modules: dict[str, dict[str, str]] = {}
        for key in self._tensors:
            match = _KEY.fullmatch(key)
            other = next((one for one in _OTHERS if one[0] in key), None)
            if match is None or other is not None:
                _, what, remedy = other or ("", "", "Remove it from the file, or")
                raise AdapterError(
                    f"{self._path}: tensor {key} is not supported: "
                    + (f"the adapter has {what}." if what else "it is no LoRA matrix of a linear layer.")
                    + f" {remedy} {MERGE}."
                )
            keys = modules.setdefault(match["module"].removeprefix("base_model.model."), {})
            if match["which"] in keys:
                raise AdapterError(f"{self._path}: {match['module']} has two matrices lora_{match['which']}.")
            keys[match["which"]] = key
        for module, keys in modules.items():
            if len(keys) < 2:
                missing = "B" if "A" in keys else "A"
                raise AdapterError(f"{self._path}: {module} has no lora_{missing}.weight.")
        return modules

    def _part(self, module: str, keys: dict[str, str], inputs: int, outputs: int) -> _Part:
        rank = self._config.rank_of(module)
        shape = self._tensors[keys["A"]]["shape"]
        if len(shape) == 2 and shape[0] > self._max_rank:
            raise AdapterError(
                f"{self._path}: {keys['A']} has rank {shape[0]}; adapters of this server may have at most"
                f" {self._max_rank}. Raise --max-lora-rank (at most 256)."
            )
        self._check(keys["A"], (rank, inputs))
        self._check(keys["B"], (outputs, rank))
        return _Part(keys["A"], keys["B"], rank, inputs, outputs, self._config.scale_of(module))

    def _check(self, key: str, shape: tuple[int, int]) -> None:
        found = self._tensors[key]
        if tuple(found["shape"]) != shape:
            raise AdapterError(
                f"{self._path}: {key} has shape {tuple(found['shape'])}; this model and the adapter's ranks require"
                f" {shape}. The adapter belongs to another model"
                + (f" ({self._config.base_model})." if self._config.base_model else ".")
            )
        if found["dtype"] not in _FLOATS:
            kind = _INTEGERS.get(found["dtype"], found["dtype"])
            raise AdapterError(f"{self._path}: {key} has the type {kind}; it must be float16, bfloat16 or wider.")

    def values(self, key: str, dtype: str) -> np.ndarray:
        found = self._tensors[key]
        kind = found["dtype"]
        values = np.frombuffer(found["data"], _FLOATS[kind]).reshape(found["shape"])
        return _converted(values, dtype, is_bfloat16=kind == "BF16")

    def not_finite(self, dtype: str) -> AdapterError:
        """Names the first tensor that is not."""
        wrong = (name for name in self._tensors if not _is_finite(self.values(name, dtype), dtype))
        return AdapterError(f"{self._path}: {next(wrong)} has values that are NaN or infinite. The file is damaged.")


def _inner(module: str) -> str:
    """The name inside of the model's layers."""
    parts = module.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _converted(values: np.ndarray, dtype: str, *, is_bfloat16: bool) -> np.ndarray:
    """To the nearest number of the type, by way of float32, as PyTorch converts."""
    if is_bfloat16:
        if dtype == BFLOAT16:
            return values
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float32, copy=False)
        return _bfloat16(values) if dtype == BFLOAT16 else values.astype(STORED[dtype], copy=False)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded


def _is_finite(numbers: np.ndarray, dtype: str) -> bool:
    if dtype == BFLOAT16:
        return not bool((numbers & _BF16_EXPONENT == _BF16_EXPONENT).any())
    return bool(np.isfinite(numbers).all())
