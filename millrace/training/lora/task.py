"""What is learned: the answers of the examples, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millrace.models.drafters.modules import DraftModule
from millrace.training.answers import Answer
from millrace.training.batches import batches_of
from millrace.training.lora.model import LoraMatrices
from millrace.training.target import Batch
from millrace.training.tasks.task import Losses, is_predicted, shifted


class AdapterTask:
    def __init__(self, model: DraftModule, matrices: dict[str, LoraMatrices]) -> None:
        self._model = model
        self.module = nn.ModuleDict({name.replace(".", "/"): own for name, own in matrices.items()})
        """What is trained; checkpoints hold no more."""

    def losses(self, batch: Batch) -> Losses:
        self._model.train(self.module.training)
        total, count = self._total(batch)
        mean = total / max(1, count)
        return Losses(mean, float(mean.detach()), 0.0)

    @torch.no_grad()
    def mean_loss(self, answers: Sequence[Answer], batch_tokens: int, device: torch.device) -> float:
        """Of all tokens of these answers, in nats per token."""
        self._model.eval()
        parts = [self._total(batch) for batch in batches_of(answers, batch_tokens, device)]
        return float(sum(float(total) for total, _ in parts) / max(1, sum(count for _, count in parts)))

    def _total(self, batch: Batch) -> tuple[Tensor, int]:
        places = is_predicted(batch, 1)
        logits = F.linear(self._model(batch.token_ids)[places], self._model.head)
        wanted = shifted(batch.token_ids, 1)[places]
        return F.cross_entropy(logits.float(), wanted, reduction="sum"), len(wanted)
