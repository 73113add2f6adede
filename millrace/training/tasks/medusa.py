"""Medusa: each head guesses one place further ahead from the same hidden state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.models.drafters.modules import MedusaModule
from millrace.models.drafters.spec import DrafterSpec
from millrace.training.target import Batch, Target
from millrace.training.tasks.task import DEPTH_DECAY, Losses, Vocabulary, is_predicted, shifted, token_loss


class MedusaTask:
    def __init__(self, spec: DrafterSpec, target: Target, vocabulary: Vocabulary) -> None:
        self.spec = spec
        self._target, self._vocabulary = target, vocabulary
        self.module = MedusaModule(spec).to(target.device)
        if self.module.lm_head is not None:
            self.module.lm_head.weight.data.copy_(vocabulary.head)

    def losses(self, batch: Batch) -> Losses:
        states = self._target.states(batch)
        total, first, weight = states.new_zeros((), dtype=torch.float32), 0.0, 1.0
        for depth, out in enumerate(self.module(states)):
            places = is_predicted(batch, depth + 2)
            if not places.any():
                break
            wanted = shifted(states, depth + 1)[places]
            tokens = shifted(batch.token_ids, depth + 2)[places]
            part = token_loss(self._target, self._vocabulary, self._logits(out[places]), wanted, tokens)
            total = total + weight * part
            first = float(part.detach()) if depth == 0 else first
            weight *= DEPTH_DECAY
        return Losses(total, first, 0.0)

    @torch.no_grad()
    def correct(self, batch: Batch) -> tuple[Tensor, Tensor]:
        right, known = [], []
        for depth, out in enumerate(self.module(self._target.states(batch))):
            places = is_predicted(batch, depth + 2) & is_predicted(batch, 1)
            wanted = self._vocabulary.draft_ids(shifted(batch.token_ids, depth + 2)[places])
            found = torch.zeros_like(places)
            found[places] = self._logits(out[places]).argmax(-1) == wanted
            right.append(found)
            known.append(places)
        return torch.stack(right), torch.stack(known)

    def _logits(self, states: Tensor) -> Tensor:
        head = self.module.lm_head
        return F.linear(states, self._vocabulary.head.to(states.dtype)) if head is None else head(states)
