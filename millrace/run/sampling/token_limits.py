"""Which tokens a row may draw, by `bad_words` and `allowed_token_ids`. Torch ops that never wait for the device, on one
row of logits. Meaning: docs/api/samplers.md."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.params.rows import RowParams
from millrace.run.device.device import Device

_ANY = -1
"""In a prefix: whatever token stands there."""
_NONE = -2
"""Before the first token of the output."""


class BadWords:
    """The token sequences that a row must not complete."""

    def __init__(self, device: Device, sequences: list[tuple[int, ...]]) -> None:
        self._depth = max(map(len, sequences)) - 1
        prefixes = np.full((len(sequences), self._depth), _ANY, np.int64)
        for line, sequence in zip(prefixes, sequences, strict=True):
            line[self._depth - len(sequence) + 1 :] = sequence[:-1]
        self._prefixes = device.upload(prefixes)
        self._is_any = self._prefixes == _ANY
        last, places = np.unique([sequence[-1] for sequence in sequences], return_inverse=True)
        self._last = device.upload(last.astype(np.int64))
        """The last tokens of all sequences, each once."""
        self._places = device.upload(places.astype(np.int64))
        """Of each sequence: where its last token is among them."""

    def forbid(self, logits: Tensor, output: Tensor) -> None:
        """Forbid, in logits [vocab], the last token of each sequence whose other tokens end the output. Where that
        would leave no token, nothing is forbidden."""
        recent = output[max(0, len(output) - self._depth) :]
        recent = torch.nn.functional.pad(recent, (self._depth - len(recent), 0), value=_NONE)
        is_due = ((self._prefixes == recent) | self._is_any).all(dim=1)
        before = logits[self._last]
        count = torch.zeros_like(before).index_add_(0, self._places, is_due.to(before.dtype))
        after = before.masked_fill(count > 0, -torch.inf)
        logits[self._last] = after
        logits[self._last] = torch.where(logits.max() > -torch.inf, after, before)


def bad_words_of(row_params: RowParams, device: Device, vocab_size: int) -> BadWords | None:
    """Sequences that end with an end token are left out: these are never forbidden."""
    ends = row_params.end_token_ids
    sequences = [
        one for one in row_params.params.bad_word_ids or () if one and one[-1] not in ends and one[-1] < vocab_size
    ]
    return BadWords(device, sequences) if sequences else None


def forbidden_tokens(row_params: RowParams, device: Device, vocab_size: int) -> Tensor | None:
    """bool [vocab]: all but `allowed_token_ids`."""
    allowed = row_params.params.allowed_token_ids
    if allowed is None:
        return None
    ids = np.array(allowed, np.int64)
    is_forbidden = np.ones(vocab_size, np.bool_)
    is_forbidden[ids[ids < vocab_size]] = False
    return device.upload(is_forbidden)
