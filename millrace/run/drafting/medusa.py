"""Drafts from Medusa heads: each guesses one of the next tokens from the target's last state.

They have no keys and values of their own, and nothing to catch up on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from millrace.models.drafters.program import MedusaDrafter
from millrace.plan.step import Admission, Int32s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress
from millrace.run.sampling.sampler import Sampler

_NONE = np.zeros(0, np.int32)


class MedusaDrafts(Drafter):
    needs_hidden = True

    def __init__(self, heads: MedusaDrafter, sampler: Sampler) -> None:
        self._heads = heads
        self._sampler = sampler
        self._hidden = torch.zeros(0)
        self._first: dict[int, int] = {}
        """Of the step being drawn: index of each row's first state."""
        self._states: dict[int, Tensor] = {}
        """By row: the state from which its last token was drawn."""

    def admit(self, admission: Admission) -> None:
        self._states.pop(admission.row, None)
        self._first.pop(admission.row, None)

    def take_hidden(self, hidden: Tensor, rows: Int32s, positions: Int32s) -> None:
        found, first = np.unique(rows, return_index=True)
        self._hidden, self._first = hidden, dict(zip(found.tolist(), first.tolist(), strict=True))

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        for progress in rows:
            first = self._first.pop(progress.row, None)
            if first is None:  # tokens that were not drawn: no state is known after them
                self._states.pop(progress.row, None)
            else:
                self._states[progress.row] = self._hidden[first + progress.num_new - 1].clone()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        drafts: list[Int32s] = [_NONE] * len(asks)
        due = [at for at, ask in enumerate(asks) if ask.row in self._states]
        if not due:
            return drafts
        rows = np.array([asks[at].row for at in due], np.int32)
        known = np.array([len(asks[at].tokens) for at in due], np.int32)
        limits = [min(asks[at].max_drafts, self._heads.spec.num_medusa_heads) for at in due]
        logits = self._heads.logits(torch.stack([self._states[row] for row in rows.tolist()]), max(limits))
        drawn = [self._draw(each, rows, known + np.int32(place)) for place, each in enumerate(logits)]
        columns = np.stack(drawn, axis=1)
        for at, limit, own in zip(due, limits, columns, strict=True):
            drafts[at] = own[:limit]
        return drafts

    def _draw(self, logits: Tensor, rows: Int32s, positions: Int32s) -> Int32s:
        chosen = self._sampler.choose(logits, rows, positions)
        return self._heads.token_ids(chosen).cpu().numpy().astype(np.int32)
