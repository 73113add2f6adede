"""A drafter's tensors, from safetensors or torch files, under one set of names whatever the format.

Names: `fc`, `model.layers.<i>.…` as in a Llama model with `hidden_norm` in the first layer of EAGLE-3, `norm` (before
the LM head), `embedding_norm`, `input_norm` and `fc_norm.<j>` (before `fc`), `embed_tokens`, `lm_head`, `d2t`, `t2d`,
and for Medusa `heads.<h>.blocks.<b>` and `heads.<h>.head`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.errors import ModelError

_RENAMES = (
    (re.compile(r"(?:midlayer|transformer)\.(.*)"), r"model.layers.0.\1"),
    (re.compile(r"(layers\.\d+\..*)"), r"model.\1"),
    (re.compile(r"fusion_fc\.(.*)"), r"fc.\1"),
    (re.compile(r"(?:embed|embedding|post_embedding)_layernorm\.(.*)"), r"embedding_norm.\1"),
    (re.compile(r"(?:lm_head|pre_lm_head)_layernorm\.(.*)"), r"norm.\1"),
    (re.compile(r"hidden_layernorm\.(.*)"), r"model.layers.0.input_layernorm.\1"),
    (re.compile(r"draft_id_to_target_id"), "d2t"),
    (re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.blocks.\2.\3"),
    (re.compile(r"(?:medusa_head\.)?(\d+)\.\d+\.weight"), r"heads.\1.head.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.head.weight"),
)
_UNUSED = re.compile(r".*rotary_emb\.inv_freq|verifier_.*|.*\.dummy")
"""Buffers that are computed, and copies of the target's tensors kept for training."""
_INTEGERS = ("d2t", "t2d", "token_map")


def canonical(stored: str) -> str:
    name = stored.removeprefix("model.")
    for pattern, replacement in _RENAMES:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name


class DrafterTensors:
    """The tensors of a directory. Implements `WeightSource`, so that the decoder's builder can read from it."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stored: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[Path, Mapping[str, Tensor]] = {}
        for path in files:
            for stored, shape in self._open(path):
                self._add(path, stored, shape)

    def _add(self, path: Path, stored: str, shape: tuple[int, ...]) -> None:
        if _UNUSED.fullmatch(stored):
            return
        name = canonical(stored)
        if name in self._stored:
            raise ModelError(f"{path}: tensor {stored} is there twice, also in {self._stored[name][0]}.")
        self._stored[name], self._shapes[name] = (path, stored), shape

    def _open(self, path: Path) -> list[tuple[str, tuple[int, ...]]]:
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt", device="cpu") as handle:
                    return [(key, tuple(handle.get_slice(key).get_shape())) for key in handle.keys()]  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}. Download it again.") from error
        self._handles[path] = _load_torch(path)
        return [(key, tuple(tensor.shape)) for key, tensor in self._handles[path].items()]

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file_of(self, name: str) -> Path:
        return self._stored[name][0]

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        path, stored = self._stored[name]
        if path in self._handles:
            tensor = self._handles[path][stored]
        else:
            with safe_open(path, framework="pt", device="cpu") as handle:
                tensor = handle.get_tensor(stored)
        if name not in _INTEGERS and not tensor.is_floating_point():
            raise ModelError(f"{path}: tensor {stored} is {tensor.dtype}; quantised drafters cannot be loaded.")
        return tensor.to(device=device, dtype=dtype)

    def count(self, pattern: str) -> int:
        """1 + the largest number that the pattern's group matches in a name; 0 if none does."""
        found = (re.match(pattern, name) for name in self._stored)
        return max((int(match[1]) + 1 for match in found if match is not None), default=0)


def _load_torch(path: Path) -> Mapping[str, Tensor]:
    """Read with torch's loader for tensors only: nothing in the file is executed."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch refuses content with errors of many kinds
        raise ModelError(
            f"{path} cannot be read as a file of tensors: {error}. Save the tensors as a safetensors file."
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ModelError(f"{path} holds something other than named tensors. Save the tensors as a safetensors file.")
    return loaded
