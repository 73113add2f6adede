"""Grammar masks: which tokens some rows of a step may draw. They reach the runner with the draw, as bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.plan.step import Int64s, Masks, Uint32s

__all__ = [
    "MaskedRows",
    "Masks",
    "Uint32s",
    "allowed_tokens",
    "apply_masks",
    "check_masks",
    "new_masks",
    "words_per_mask",
]

TOKENS_PER_WORD = 32


def words_per_mask(vocab_size: int) -> int:
    return -(-vocab_size // TOKENS_PER_WORD)


def new_masks(count: int, vocab_size: int) -> Uint32s:
    """Memory for masks, not initialised."""
    return np.empty((count, words_per_mask(vocab_size)), np.uint32)


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The rows of a step that need masks: one for each place of a row, so one more than it has drafts."""

    index: Int64s
    """Indices of these rows among those that draw, ascending."""
    request_ids: Int64s
    drafts: list[list[int]]
    """Drafts of each row."""

    @property
    def num_masks(self) -> int:
        return len(self.index) + sum(map(len, self.drafts))

    def masks(self, bits: Uint32s) -> Masks:
        """`bits`: of all places, row after row."""
        if len(bits) == len(self.index):
            return Masks(self.index, bits)
        counts = np.array([1 + len(own) for own in self.drafts])
        places = np.arange(len(bits)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Masks(np.repeat(self.index, counts), bits, places)


def allowed_tokens(masks: Masks, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[n, vocab]"""
    octets = np.ascontiguousarray(masks.bits, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def check_masks(masks: Masks | None, masked: Int64s) -> None:
    """`masked`: indices of the rows, among those that draw, for which the plan announced masks."""
    given = [] if masks is None else masks.rows.tolist()
    if given != masked.tolist():
        raise ValueError(f"The draw has masks for rows {given}, but its plan announced them for {masked.tolist()}.")


def apply_masks(logits: Tensor, masks: Masks) -> None:
    """Set the logits [draws, vocab] of tokens that may not be drawn to -inf."""
    allowed = torch.from_numpy(allowed_tokens(masks, logits.shape[1])).to(logits.device)
    for line, index in enumerate(masks.index.tolist()):
        logits[index].masked_fill_(~allowed[line], -torch.inf)
