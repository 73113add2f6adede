"""EAGLE: chains of drafts over the target's hidden states, trained with the drafter's own states as later inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.models.drafters.modules import EagleModule
from millrace.models.drafters.spec import DrafterSpec
from millrace.training.target import Batch, Target
from millrace.training.tasks.task import DEPTH_DECAY, Losses, Vocabulary, is_predicted, shifted, token_loss

FEATURE_WEIGHT = 0.1
"""Weight of the distance to the target's hidden states, whose scale is set to 1."""


class EagleTask:
    def __init__(self, spec: DrafterSpec, target: Target, vocabulary: Vocabulary, depth: int) -> None:
        self.spec, self.depth = spec, depth
        self._target, self._vocabulary = target, vocabulary
        self.module = EagleModule(spec).to(target.device)
        _initialise(self.module)
        if self.module.lm_head is not None:
            self.module.lm_head.weight.data.copy_(vocabulary.head)

    def losses(self, batch: Batch) -> Losses:
        states = self._target.states(batch)
        scale = states.float().square().mean().sqrt().clamp(min=1e-6)
        total, first, features, weight = states.new_zeros((), dtype=torch.float32), 0.0, 0.0, 1.0
        for depth, out in enumerate(self._chain(batch, states)):
            places = is_predicted(batch, depth + 2)
            if not places.any():
                break
            wanted = shifted(states, depth + 1)[places]
            tokens = shifted(batch.token_ids, depth + 2)[places]
            own = out[places]
            token_part = token_loss(self._target, self._vocabulary, self._logits(own), wanted, tokens)
            feature_part = F.smooth_l1_loss(own.float() / scale, wanted.float() / scale)
            total = total + weight * (token_part + FEATURE_WEIGHT * feature_part)
            if depth == 0:
                first, features = float(token_part.detach()), float(feature_part.detach())
            weight *= DEPTH_DECAY
        return Losses(total, first, features)

    @torch.no_grad()
    def correct(self, batch: Batch) -> tuple[Tensor, Tensor]:
        states = self._target.states(batch)
        right, known = [], []
        for depth, out in enumerate(self._chain(batch, states)):
            # A chain starts once the target has written a token of its own.
            places = is_predicted(batch, depth + 2) & is_predicted(batch, 1)
            wanted = self._vocabulary.draft_ids(shifted(batch.token_ids, depth + 2)[places])
            found = torch.zeros_like(places)
            found[places] = self._logits(out[places]).argmax(-1) == wanted
            right.append(found)
            known.append(places)
        return torch.stack(right), torch.stack(known)

    def _chain(self, batch: Batch, states: Tensor) -> list[Tensor]:
        """Per depth the states [B, T, hidden] for the LM head."""
        module, device = self.module, batch.token_ids.device
        kv, hidden = module.new_kv(), module.fuse(states)
        positions = torch.arange(batch.token_ids.shape[1], device=device).expand_as(batch.token_ids)
        found = []
        for depth in range(self.depth):
            embedded = self._target.embed(shifted(batch.token_ids, depth + 1))
            out = module(embedded, hidden, positions + depth, kv)
            hidden = out.hidden
            found.append(out.for_head)
        return found

    def _logits(self, states: Tensor) -> Tensor:
        head = self.module.lm_head
        return F.linear(states, self._vocabulary.head.to(states.dtype)) if head is None else head(states)


def _initialise(module: EagleModule) -> None:
    """Small random matrices: the first logits are nearly even."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    if module.fc.bias is not None:
        torch.nn.init.zeros_(module.fc.bias)
