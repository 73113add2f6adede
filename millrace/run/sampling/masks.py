"""Grammar masks: which tokens some rows of a step may draw. They reach the runner with the draw, as bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.plan.step import Int64s

TOKENS_PER_WORD = 32
Uint32s = npt.NDArray[np.uint32]


def words_per_mask(vocab_size: int) -> int:
    return -(-vocab_size // TOKENS_PER_WORD)


def new_masks(count: int, vocab_size: int) -> Uint32s:
    """Memory for masks, not initialised."""
    return np.empty((count, words_per_mask(vocab_size)), np.uint32)


@dataclass(frozen=True, slots=True)
class Masks:
    """One mask for each drawn token that a grammar restricts."""

    index: Int64s
    """Indices of these tokens among those that the step draws, ascending."""
    bits: Uint32s
    """[n, words_per_mask(vocab)]: bit t % 32 of word t // 32 is 1 if token t may be drawn."""

    def of(self, draws: Int64s) -> Masks | None:
        """The masks of some of the drawn tokens, ascending, which are then numbered from 0; None if none has one."""
        is_kept = np.isin(self.index, draws)
        return Masks(np.searchsorted(draws, self.index[is_kept]), self.bits[is_kept]) if is_kept.any() else None


def allowed_tokens(masks: Masks, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[n, vocab]"""
    octets = np.ascontiguousarray(masks.bits, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def check_masks(masks: Masks | None, masked: Int64s) -> None:
    """`masked`: indices of the tokens for which the plan announced a mask."""
    given = [] if masks is None else masks.index.tolist()
    if given != masked.tolist():
        raise ValueError(f"The draw has masks for tokens {given}, but its plan announced them for {masked.tolist()}.")


def apply_masks(logits: Tensor, masks: Masks) -> None:
    """Set the logits [draws, vocab] of tokens that may not be drawn to -inf."""
    allowed = torch.from_numpy(allowed_tokens(masks, logits.shape[1])).to(logits.device)
    for line, index in enumerate(masks.index.tolist()):
        logits[index].masked_fill_(~allowed[line], -torch.inf)
