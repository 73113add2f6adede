"""A reduced draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace.training.answers import Answer


def frequent_tokens(answers: Sequence[Answer], size: int, vocab_size: int) -> Tensor:
    """int64 [size], ascending. Ties, such as tokens never written, go to the lower id: tokenizers give frequent pieces
    low ids."""
    written = torch.tensor([token for answer in answers for token in answer.token_ids[answer.num_prompt :]])
    counts = torch.bincount(written, minlength=vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def coverage(answers: Sequence[Answer], ids: Tensor | None, vocab_size: int) -> float:
    """Share of written tokens that the vocabulary holds."""
    if ids is None:
        return 1.0
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    written = torch.tensor([token for answer in answers for token in answer.token_ids[answer.num_prompt :]])
    return float(known[written].float().mean()) if len(written) else 1.0
