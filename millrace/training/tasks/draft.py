"""A draft model: a few of the target's own layers, trained to give the target's probabilities."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.errors import ModelError
from millrace.models.drafters.modules import DraftModule, can_train
from millrace.models.drafters.spec import DrafterSpec
from millrace.models.spec.model_spec import ModelSpec
from millrace.training.target import Batch, Target
from millrace.training.tasks.task import Losses, Vocabulary, is_predicted, shifted, token_loss

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def draft_spec(target: ModelSpec, num_layers: int) -> tuple[ModelSpec, tuple[int, ...]]:
    """(spec of the draft model, the target's layers that it starts from). Refuses families that the module lacks."""
    if not can_train(target):
        raise ModelError(
            f"A draft model cannot be made from a {target.family} model; Llama-like models are supported. Train"
            " --kind eagle or --kind medusa instead."
        )
    if not 1 <= num_layers < target.num_layers:
        raise ModelError(f"A draft model of {num_layers} layers is not smaller than the target ({target.num_layers}).")
    last = target.num_layers - 1
    chosen = tuple(round(index * last / max(1, num_layers - 1)) for index in range(num_layers))
    return replace(target, layers=tuple(target.layers[index] for index in chosen)), chosen


class DraftTask:
    def __init__(
        self, spec: DrafterSpec, target: Target, vocabulary: Vocabulary, depth: int, chosen: tuple[int, ...]
    ) -> None:
        assert spec.decoder is not None
        self.spec, self.depth = spec, depth
        self._target, self._vocabulary = target, vocabulary
        self.module = DraftModule(spec.decoder)
        self.module.load_state_dict(_own_weights(target, chosen))
        self.module.to(target.device)

    def losses(self, batch: Batch) -> Losses:
        places = is_predicted(batch, 1)
        wanted = self._target.states(batch)[places]
        logits = F.linear(self.module(batch.token_ids)[places], self.module.head)
        total = token_loss(self._target, self._vocabulary, logits, wanted, shifted(batch.token_ids, 1)[places])
        return Losses(total, float(total.detach()), 0.0)

    @torch.no_grad()
    def correct(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """With true tokens before it, a draft does not depend on the chain it belongs to."""
        places = is_predicted(batch, 1)
        found = torch.zeros_like(places)
        logits = F.linear(self.module(batch.token_ids)[places], self.module.head)
        found[places] = logits.argmax(-1) == shifted(batch.token_ids, 1)[places]
        right = [shifted(found, depth + 1) for depth in range(self.depth)]
        known = [is_predicted(batch, depth + 2) & is_predicted(batch, 1) for depth in range(self.depth)]
        return torch.stack(right), torch.stack(known)


def _own_weights(target: Target, chosen: tuple[int, ...]) -> dict[str, Tensor]:
    found = {}
    for name in target.weight_names():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[name] = target.weight(name)
            continue
        for index, layer in enumerate(chosen):
            if layer == int(match[1]) and not match[2].endswith("inv_freq"):
                found[f"model.layers.{index}.{match[2]}"] = target.weight(name)
    return found
