"""Routing tokens to experts: softmax over all experts, then the top k.

make() -> function (logits [T, E], top_k, renormalise) -> (weights float32 [T, k], expert ids int32 or int64 [T, k]),
each token's experts by falling probability. The order of equally likely experts is up to the version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.ops.base.version import Version
from millrace.ops.triton import triton_missing

Route = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Renormalised weights sum to one; otherwise they are the softmax probabilities."""
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
        when="one kernel: softmax, top-k and renormalisation of a token in the registers of one warp",
        devices=("cuda",),
        invariant_on=("cuda",),
        missing=triton_missing,
    ),
    Version(
        op="router",
        name="torch",
        make=lambda: route,
        when="the reference: softmax and top-k over each token's logits",
        invariant_on=("cpu",),
    ),
)
