"""Routing as in DeepSeek V2 and V3: scaled weights, experts of the best groups only, a bias for the choice.

make(routing, bias) -> Route, see `router.py`. The bias [E] is float32; None for none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.base.routing import Routing
from millrace.ops.base.version import Version

TINY = 1e-20
"""Added to the sum of the weights that are renormalised."""


class LimitedRoute:
    def __init__(self, routing: Routing, bias: Tensor | None) -> None:
        self._routing, self._bias = routing, bias

    def __call__(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        wide, own = logits.float(), self._routing
        scores = torch.sigmoid(wide) if own.scores == "sigmoid" else torch.softmax(wide, dim=-1)
        wanted = scores if self._bias is None else scores + self._bias
        if own.top_groups < own.num_groups:
            wanted = self._of_best_groups(wanted)
        expert_ids = torch.topk(wanted, top_k, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return weights * own.scale, expert_ids

    def _of_best_groups(self, wanted: Tensor) -> Tensor:
        """-inf for the experts of other groups."""
        own = self._routing
        groups = wanted.view(wanted.shape[0], own.num_groups, -1)
        best = groups.topk(2 if own.scores == "sigmoid" else 1, dim=-1).values.sum(dim=-1)
        chosen = torch.topk(best, own.top_groups, dim=-1).indices
        others = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        return groups.masked_fill(others[..., None], float("-inf")).flatten(1)


VERSIONS = (
    Version(
        op="limited_router",
        name="torch",
        make=LimitedRoute,
        when="the reference: scores, the best groups, and the top k of their experts",
        invariant_on=("cpu", "cuda"),
    ),
)
