"""Routing tokens to experts: softmax over all experts, then the k likeliest.

make() -> function (logits [T, E], top_k, renormalise) -> (weights [T, k] float32, expert ids [T, k] int64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.version import Version


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Renormalised weights sum to one; otherwise they are the experts' shares of the whole softmax."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    weights, expert_ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, expert_ids


VERSIONS = (
    Version(
        op="router",
        name="torch",
        make=lambda: route,
        when="defines the meaning: a softmax and a top-k over each token's own logits",
        invariant_on=("cpu",),
    ),
)
