"""Weights from GGUF files, dequantised and converted to the Hugging Face convention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from millrace.errors import ModelError
from millrace.models.spec.shard import Cut
from millrace.models.weights.gguf_encoder_names import encoder_pieces
from millrace.models.weights.gguf_names import pieces_by_name
from millrace.models.weights.gguf_piece import GgufPiece
from millrace.models.weights.source import cut_of
from millrace.ops.linear.gguf_values import PLAIN, Bytes, check_supported, dequantise, stored_dtype
from millrace.sources.encoders.families import is_encoder
from millrace.sources.gguf.model import GgufModel


class GgufWeights:
    """Reads tensors from the memory map on demand. Thread-safe."""

    def __init__(self, model: GgufModel, config: dict[str, Any]) -> None:
        self._model = model
        self._pieces = (encoder_pieces if is_encoder(config) else pieces_by_name)(model, config)
        for piece in self._pieces.values():
            for tensor in filter(None, (piece.tensor, piece.values)):
                check_supported(model.tensor(tensor).type, f"{self._where(piece)} tensor '{tensor}'")
            self._check_heads(piece)

    def names(self) -> Iterable[str]:
        return self._pieces.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._piece(name).shape

    def file_of(self, name: str) -> Path:
        return self._model.file_of(self._piece(name).tensor).path

    def get(self, name: str, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._read(self._piece(name), device, dtype)

    def part(
        self, name: str, cut: Cut, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        piece = self._piece(name)
        if piece.values or self._is_expert_bias(piece):
            return cut_of(self._read(piece, device, dtype), cut)
        tensor = self._read(_cut_rows(piece, cut), device, dtype)
        return tensor if cut.columns is None else tensor[:, cut.columns.start : cut.columns.stop].contiguous()

    def _read(self, piece: GgufPiece, device: torch.device | None, dtype: torch.dtype | None) -> torch.Tensor:
        if piece.values:
            return self._keys_and_values(piece).to(device=device, dtype=dtype)
        kind = self._model.tensor(piece.tensor).type
        scale = self._scale(piece)
        # Corrections are computed in float32; rounding to the requested dtype comes last.
        computed = piece.minus_one or scale is not None
        out = torch.empty(piece.shape, dtype=torch.float32 if computed else dtype or stored_dtype(kind))
        dequantise(self._rows(piece), kind, out)
        if piece.minus_one:
            out -= 1.0
        if scale is not None:
            out *= scale
        return out.to(device=device, dtype=dtype if dtype is not None else stored_dtype(kind))

    def _keys_and_values(self, piece: GgufPiece) -> torch.Tensor:
        """From latents to each head's key, then to its value: float32 [rows, rank]."""
        heads = []
        for name in (piece.tensor, piece.values):
            tensor, factors = self._model.tensor(name), self._factors(name)
            own = torch.empty(tensor.shape)
            dequantise(np.ascontiguousarray(self._model.data(name)), tensor.type, own)
            heads.append(own if factors is None else own * torch.tensor(factors)[:, None, None])
        keys, values = heads
        return torch.cat((keys.mT, values), dim=1).reshape(piece.shape)

    def stored_label(self, name: str) -> str:
        """The format as GGUF calls it: Q4_K."""
        return str(self._model.tensor(self._piece(name).tensor).type.name)

    def stored_bytes(self, name: str) -> int:
        piece = self._piece(name)
        if piece.values:
            return sum(self._model.tensor(tensor).num_bytes for tensor in (piece.tensor, piece.values))
        block_items, block_bytes = gguf.GGML_QUANT_SIZES[self._model.tensor(piece.tensor).type]
        return math.prod(piece.shape) // block_items * block_bytes

    def stored_format(self, name: str) -> str | None:
        """The format of a quantised matrix whose blocks can be used unchanged; else None."""
        piece = self._piece(name)
        tensor = self._model.tensor(piece.tensor)
        plain = tensor.type in PLAIN or len(piece.shape) != 2 or bool(piece.values)
        return None if plain or piece.minus_one or self._scale(piece) is not None else tensor.type.name

    def stored_rows(self, name: str) -> Bytes:
        """The matrix's stored blocks [rows, bytes], contiguous, in the Hugging Face order of rows."""
        return np.ascontiguousarray(self._rows(self._piece(name)))

    def stored_part(self, name: str, cut: Cut) -> Bytes:
        """The blocks of a part of the matrix that begins and ends between blocks."""
        piece = self._piece(name)
        rows = self._rows(_cut_rows(piece, cut))
        if cut.columns is None:
            return np.ascontiguousarray(rows)
        items, size = gguf.GGML_QUANT_SIZES[self._model.tensor(piece.tensor).type]
        return np.ascontiguousarray(rows[:, cut.columns.start // items * size : cut.columns.stop // items * size])

    def _piece(self, name: str) -> GgufPiece:
        piece = self._pieces.get(name)
        if piece is None:
            raise ModelError(f"{self._model.path} has no tensor for {name}; the file is incomplete.")
        return piece

    def _where(self, piece: GgufPiece) -> str:
        return f"{self._model.file_of(piece.tensor).path}:"

    def _rows(self, piece: GgufPiece) -> Bytes:
        """The raw bytes of a piece. Blocks never span rows, so rows can be reordered before decoding."""
        raw = self._model.data(piece.tensor)
        total_rows = self._total_rows(piece)
        rows = raw.reshape(total_rows, -1)[piece.first_row : piece.first_row + piece.num_rows]
        if not piece.permuted_heads:
            return rows
        pairs = rows.reshape(piece.permuted_heads, -1, 2, rows.shape[-1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _total_rows(self, piece: GgufPiece) -> int:
        shape = self._model.tensor(piece.tensor).shape
        return shape[0] if len(shape) == 1 else int(np.prod(shape[:-1], dtype=np.int64))

    def _is_expert_bias(self, piece: GgufPiece) -> bool:
        """A bias that is one row of the biases of all experts."""
        return len(piece.shape) == 1 and len(self._model.tensor(piece.tensor).shape) == 2

    def _check_heads(self, piece: GgufPiece) -> None:
        """Check that rows divide into heads of even size, and that vectors are not quantised."""
        tensor = self._model.tensor(piece.tensor)
        if piece.permuted_heads and piece.num_rows % (2 * piece.permuted_heads):
            raise ModelError(
                f"{self._where(piece)} tensor '{piece.tensor}' has {piece.num_rows} rows, which are not"
                f" {piece.permuted_heads} heads of an even size. Convert the model again."
            )
        if len(tensor.shape) == 1 and tensor.num_bytes % tensor.shape[0]:
            raise ModelError(
                f"{self._where(piece)} tensor '{piece.tensor}' is a vector of type {tensor.type.name};"
                " vectors must not be quantised. Convert the model again."
            )

    def _scale(self, piece: GgufPiece) -> float | None:
        factors = self._factors(piece.tensor)
        return None if factors is None else factors[piece.expert if piece.expert is not None and factors[1:] else 0]

    def _factors(self, name: str) -> list[float] | None:
        """Some 4-bit files store a further factor per tensor, or for each of its matrices, in a separate tensor."""
        factors = name.removesuffix(".weight") + ".scale"
        if factors not in self._model:
            return None
        shape, own = self._model.tensor(name).shape, self._model.tensor(factors)
        count = shape[0] if len(shape) == 3 else 1
        if own.type != gguf.GGMLQuantizationType.F32 or own.shape not in ((1,), (count,)):
            raise ModelError(
                f"{self._model.file_of(factors).path}: tensor '{factors}' has type {own.type.name} and shape"
                f" {own.shape}; it must have one F32 factor, or one for each of {count} matrices. Convert the model"
                " again."
            )
        return [float(value) for value in self._model.data(factors).view("<f4")]


def _cut_rows(piece: GgufPiece, cut: Cut) -> GgufPiece:
    """Heads whose rotary halves are reordered are whole."""
    if cut.rows is None:
        return piece
    return replace(
        piece,
        shape=(len(cut.rows), *piece.shape[1:]),
        first_row=piece.first_row + cut.rows.start,
        num_rows=len(cut.rows),
        permuted_heads=piece.permuted_heads * len(cut.rows) // piece.num_rows,
    )
