"""A part of a GGUF tensor that is one Hugging Face tensor."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.sources.gguf.model import GgufModel


@dataclass(frozen=True, slots=True)
class GgufPiece:
    """Rows `first_row` to `first_row + num_rows` of a tensor, with all axes but the last flattened, seen as `shape`."""

    tensor: str
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    permuted_heads: int = 0
    """If not 0: number of heads whose rotary halves are interleaved and must be reordered."""
    minus_one: bool = False
    """The file holds weight + 1 (norms of the Gemma family)."""
    expert: int | None = None
    values: str = ""
    """Latent attention: the tensor that holds each head's rows from latents to values. This one then holds, transposed,
    those to keys: newer files have two tensors in place of one."""


def whole_piece(model: GgufModel, tensor: str) -> GgufPiece:
    """The whole tensor. A vector counts as rows of one item, so that items can be selected like rows."""
    shape = model.tensor(tensor).shape
    rows = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        rows *= size
    return GgufPiece(tensor, shape, 0, rows)
