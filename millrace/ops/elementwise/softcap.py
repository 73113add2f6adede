"""Soft cap: tanh maps scores into (-cap, cap)."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.base.version import Version


def softcap(scores: Tensor, cap: float) -> Tensor:
    return torch.tanh(scores / cap) * cap


VERSIONS = (
    Version(
        op="softcap",
        name="torch",
        make=lambda: softcap,
        when="the only version: three elementwise passes over the logits",
        invariant_on=("cpu", "cuda"),
    ),
)
