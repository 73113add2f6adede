"""Routing tokens to experts: softmax over all experts, then the k likeliest.

make() -> function (logits [T, E], top_k, renormalise) -> (weights [T, k] float32, expert ids [T, k] int32 or int64),
a token's choices from the likeliest down. Which of equally likely experts come first is a version's own affair.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.ops.triton import triton_missing
from millrace.ops.version import Version

Route = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Renormalised weights sum to one; otherwise they are the experts' shares of the whole softmax."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    weights, expert_ids = torch.topk(probabilities, top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, expert_ids


def make_triton() -> Route:
    from millrace.ops.triton.moe.experts import route as triton_route

    return triton_route


VERSIONS = (
    Version(
        op="router",
        name="triton",
        make=make_triton,
        when="one kernel: softmax, choice and renormalisation of a token in one warp's registers",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="router",
        name="torch",
        make=lambda: route,
        when="defines the meaning: a softmax and a top-k over each token's own logits",
        invariant_on=("cpu",),
    ),
)
