"""The interface of a training task, and what all tasks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millrace.models.drafters.spec import DrafterSpec
from millrace.training.target import Batch, Target

DEPTH_DECAY = 0.8
"""Weight of a drafted position in the loss, relative to the one before it: it counts only if that was accepted."""


@dataclass(frozen=True, slots=True)
class Losses:
    total: Tensor
    tokens: float
    """Mean divergence from the target's probabilities at the first drafted position, in nats."""
    features: float
    """Mean distance to the target's hidden states; 0 for kinds that do not learn them."""


class Learned(Protocol):
    """What the optimiser's loop needs: parameters and their loss."""

    @property
    def module(self) -> nn.Module: ...

    def losses(self, batch: Batch) -> Losses: ...


class Task(Learned, Protocol):
    @property
    def spec(self) -> DrafterSpec: ...

    def correct(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """bool [depth, B, T] each: whether the draft at this depth of the chain that starts at a place is the target's
        own token, and whether the sequence has a token there to compare with."""
        ...


class Vocabulary:
    """The tokens that a drafter can propose, and the target's head for them."""

    def __init__(self, target: Target, ids: Tensor | None) -> None:
        """`ids`: int64 [draft vocabulary], ascending; None: all."""
        device = target.device
        self.ids = None if ids is None else ids.to(device)
        self.size = target.spec.vocab_size if ids is None else len(ids)
        self.head = target.head_matrix(ids)
        self._draft_of = torch.arange(target.spec.vocab_size, device=device)
        if self.ids is not None:
            self._draft_of = torch.full_like(self._draft_of, -1)
            self._draft_of[self.ids] = torch.arange(self.size, device=device)

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """The draft id of each token; -1 if the drafter cannot propose it."""
        return self._draft_of[token_ids]


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, …] moved `by` places to the left, filled with zeros."""
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), dim=1)


def is_predicted(batch: Batch, ahead: int) -> Tensor:
    """bool [B, T]: the token `ahead` places on exists and was written by the target."""
    places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device) + ahead
    return (places < batch.lengths[:, None]) & (places >= batch.answer_starts[:, None])


def token_loss(target: Target, vocabulary: Vocabulary, logits: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """Mean divergence (cross-entropy less the target's entropy, so that 0 is perfect) between the target's
    probabilities after `states` [n, hidden] and the drafter's logits [n, draft vocabulary], over the places where the
    target's `tokens` [n] can be proposed."""
    with torch.no_grad():
        wanted = target.soft_targets(states, vocabulary.head)
        weight = (vocabulary.draft_ids(tokens) >= 0).float()
        entropy: Tensor = torch.special.entr(wanted).sum(-1)
    each = -(wanted * F.log_softmax(logits.float(), dim=-1)).sum(-1) - entropy
    mean: Tensor = (each * weight).sum() / weight.sum().clamp(min=1.0)
    return mean
