"""Weights from safetensors files: a single file, or shards listed in an index."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from millrace.errors import ModelError
from millrace.models.spec.families import renamed, renames_of
from millrace.models.spec.shard import Cut
from millrace.models.weights.source import cut_of
from millrace.sources.hf_files import INDEX, weight_map

_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes of the text model in multimodal checkpoints."""
_OTHER_MODALITIES = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.", "visual.", "connector."),
    *("image_newline",),
)
_FUSED = re.compile(
    r"(?P<prefix>model\.layers\.\d+)\.mlp\.experts\.(?P<own>gate_up_proj|down_proj)(?P<end>|_bias|_blocks|_scales)"
)
_TRANSPOSED = {"llama4_text": "intermediate_size", "qwen3_vl_moe_text": "moe_intermediate_size"}
"""Model types whose published stacked experts have rows and columns exchanged: the key of an expert's inner size."""
_MIXTRAL_ROUTER = re.compile(r"(model\.layers\.\d+)\.mlp\.gate\.weight")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a tensor is stored: a name in a file, and for stacked experts the expert and its first row."""

    path: Path
    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    step: int = 1
    """Distance of its rows among those of the expert."""
    is_transposed: bool = False
    """The expert's rows are its columns in the file."""


class SafetensorsWeights:
    def __init__(self, folder: Path, files: tuple[Path, ...], config: dict[str, Any]) -> None:
        self._folder = folder
        self._handles = {path: _open(path) for path in files}
        self._pieces: dict[str, _Piece] = {}
        self._renames = renames_of(config)
        for path in files:
            for stored in self._handles[path].keys():  # noqa: SIM118 - a safetensors handle is no mapping
                for name, piece in self._read_entry(path, stored, config):
                    if name in self._pieces:
                        raise ModelError(f"{path}: tensor {name} is also in {self._pieces[name].path}.")
                    self._pieces[name] = piece
        if (folder / INDEX).is_file():
            self._check_index()
        self._add_missing_prefix()

    def names(self) -> Iterable[str]:
        return self._pieces.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._piece(name).shape

    def file_of(self, name: str) -> Path:
        return self._piece(name).path

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        piece = self._piece(name)
        stored_type = self._stored_type(piece)
        if stored_type not in _FLOATS:
            raise ModelError(
                f"{piece.path}: tensor {piece.stored} has the type {stored_type}, which is not a plain float."
                " Use the unquantised model or a GGUF file of it."
            )
        return self.raw(name).to(device=device, dtype=dtype)

    def part(
        self, name: str, cut: Cut, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        piece = self._piece(name)
        if piece.expert is not None or len(piece.shape) > 2 or self._stored_type(piece) not in _FLOATS:
            return cut_of(self.get(name, device=device, dtype=dtype), cut)
        stored = self._handles[piece.path].get_slice(piece.stored)
        read: torch.Tensor = stored[cut.slices(len(piece.shape))]
        return read.to(device=device, dtype=dtype).contiguous()

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, of any type, on the CPU."""
        piece = self._piece(name)
        try:
            return self._read(self._handles[piece.path], piece)
        except SafetensorError as error:
            raise ModelError(f"{piece.path}: tensor {piece.stored} cannot be read: {error}. Download again.") from error

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype, without reading the tensor."""
        piece = self._piece(name)
        found = _DTYPES.get(self._stored_type(piece))
        if found is None:
            raise ModelError(f"{piece.path}: tensor {piece.stored} has the unknown type {self._stored_type(piece)}.")
        return found

    def stored_label(self, name: str) -> str:
        """The stored type, as people write it: bfloat16."""
        return str(self.dtype(name)).removeprefix("torch.")

    def stored_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def metadata(self) -> dict[str, str]:
        """The free text entries of all headers."""
        return {key: text for handle in self._handles.values() for key, text in (handle.metadata() or {}).items()}

    def _stored_type(self, piece: _Piece) -> str:
        try:
            return str(self._handles[piece.path].get_slice(piece.stored).get_dtype())
        except SafetensorError as error:
            raise ModelError(f"{piece.path}: tensor {piece.stored} cannot be read: {error}. Download again.") from error

    def _piece(self, name: str) -> _Piece:
        piece = self._pieces.get(name)
        if piece is None:
            raise ModelError(f"{self._folder} has no tensor {name}; a file is missing or belongs to another model.")
        return piece

    @staticmethod
    def _read(handle: Any, piece: _Piece) -> torch.Tensor:
        if piece.expert is None:
            whole: torch.Tensor = handle.get_tensor(piece.stored)
            return whole
        if piece.step > 1 or piece.is_transposed:
            whole = handle.get_slice(piece.stored)[piece.expert : piece.expert + 1][0]
            whole = whole.t() if piece.is_transposed else whole
            end = piece.first_row + piece.step * piece.shape[0]
            return whole[piece.first_row : end : piece.step].contiguous()
        rows = slice(piece.first_row, piece.first_row + piece.shape[0])
        part: torch.Tensor = handle.get_slice(piece.stored)[piece.expert : piece.expert + 1, rows]
        return part[0].contiguous()

    def _read_entry(self, path: Path, stored: str, config: dict[str, Any]) -> Iterator[tuple[str, _Piece]]:
        name = stored
        for prefix, plain in _PREFIXES:
            if stored.startswith(prefix):
                name = plain + stored.removeprefix(prefix)
        if name.removeprefix("model.").startswith(_OTHER_MODALITIES):
            return
        name = renamed(name, self._renames)
        shape = tuple(self._handles[path].get_slice(stored).get_shape())
        fused = _FUSED.fullmatch(name)
        if fused is not None and config.get("model_type") == "gpt_oss":
            yield from _split_interleaved_experts(path, stored, shape, fused, config)
            return
        if fused is not None and not fused["end"]:
            yield from _split_experts(path, stored, shape, fused, config)
            return
        if config.get("model_type") == "mixtral":
            name = _MIXTRAL_ROUTER.sub(r"\1.block_sparse_moe.gate.weight", name)
        yield name, _Piece(path, stored, shape)

    def _check_index(self) -> None:
        stored = {(piece.path.name, piece.stored) for piece in self._pieces.values()}
        for name, file in weight_map(self._folder).items():
            if (file, name) not in stored and not name.removeprefix("model.").startswith(_OTHER_MODALITIES):
                raise ModelError(f"{self._folder / file} has no tensor {name}, listed in {INDEX}. Download it again.")

    def _add_missing_prefix(self) -> None:
        """Checkpoints of a decoder without its LM head omit the leading `model.`."""
        if "embed_tokens.weight" in self._pieces:
            self._pieces = {
                name if name.startswith("lm_head.") else f"model.{name}": piece for name, piece in self._pieces.items()
            }


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ModelError(f"There is no file {path}. Download the missing file.") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}. Download it again.") from error


def _split_experts(
    path: Path, stored: str, shape: tuple[int, ...], fused: re.Match[str], config: dict[str, Any]
) -> Iterator[tuple[str, _Piece]]:
    """Stacked experts: `gate_up_proj` [experts, gate rows then up rows, width], `down_proj` [experts, width, rows]; in
    some checkpoints with the last two axes exchanged."""
    halves = fused["own"] == "gate_up_proj"
    inner = config.get(_TRANSPOSED.get(str(config.get("model_type")), ""), 0)
    is_transposed = inner > 0 and shape[-1] == (2 * inner if halves else config.get("hidden_size"))
    shape = (*shape[:1], *shape[:0:-1]) if is_transposed else shape
    width_axis = 2 if halves else 1
    if len(shape) != 3 or shape[width_axis] != config.get("hidden_size") or (halves and shape[1] % 2):
        raise ModelError(
            f"{path}: stacked experts {stored} have shape {shape}, which does not fit hidden_size"
            f" {config.get('hidden_size')}. Save the model again with one tensor per expert."
        )
    is_mixtral = config.get("model_type") == "mixtral"
    base = f"{fused['prefix']}.{'block_sparse_moe' if is_mixtral else 'mlp'}.experts"
    owns = (
        (("w1", "w3") if is_mixtral else ("gate_proj", "up_proj")) if halves else ("w2" if is_mixtral else "down_proj",)
    )
    rows = shape[1] // len(owns)
    for expert in range(shape[0]):
        for index, own in enumerate(owns):
            piece = _Piece(path, stored, (rows, shape[2]), expert, index * rows, is_transposed=is_transposed)
            yield f"{base}.{expert}.{own}.weight", piece


_GPT_OSS_ENDS = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}


def _split_interleaved_experts(
    path: Path, stored: str, shape: tuple[int, ...], fused: re.Match[str], config: dict[str, Any]
) -> Iterator[tuple[str, _Piece]]:
    """Stacked experts of gpt-oss: gate rows alternate with up rows. Plain weights have rows and columns exchanged;
    MXFP4 has blocks [experts, rows, columns / 32, 16] and scales [experts, rows, columns / 32]."""
    hidden, inner = config.get("hidden_size", 0), config.get("intermediate_size", 0)
    owns = ("gate_proj", "up_proj") if fused["own"] == "gate_up_proj" else ("down_proj",)
    rows, columns = (inner, hidden) if len(owns) == 2 else (hidden, inner)
    every = len(owns) * rows
    own_shape, whole = {
        "": ((rows, columns), (columns, every)),
        "_bias": ((rows,), (every,)),
        "_blocks": ((rows, columns // 32, 16), (every, columns // 32, 16)),
        "_scales": ((rows, columns // 32), (every, columns // 32)),
    }[fused["end"]]
    if shape[1:] != whole:
        raise ModelError(
            f"{path}: stacked experts {stored} have shape {shape}; the config requires {('experts', *whole)}."
            " The config and the weights belong to different models; download both again."
        )
    for expert in range(shape[0]):
        for index, own in enumerate(owns):
            name = f"{fused['prefix']}.mlp.experts.{expert}.{own}.{_GPT_OSS_ENDS[fused['end']]}"
            yield name, _Piece(path, stored, own_shape, expert, index, len(owns), is_transposed=not fused["end"])
