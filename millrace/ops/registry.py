"""All ops with their versions, best first, and the choice between them: made once, when a model is loaded."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

from millrace.errors import ConfigError
from millrace.ops import activation, attention, norm
from millrace.ops.head import embedding, softcap
from millrace.ops.linear import dense, fp8, gated, qkv, stored
from millrace.ops.moe import experts, router
from millrace.ops.version import Choice, Version, short_name

OPS: Mapping[str, tuple[Version, ...]] = types.MappingProxyType(
    {
        "embedding": embedding.VERSIONS,
        "tied_embedding": embedding.TIED_VERSIONS,
        "linear": dense.VERSIONS,
        "stored_linear": stored.VERSIONS,
        "fp8_linear": fp8.VERSIONS,
        "gated_linear": gated.VERSIONS,
        "rms_norm": norm.RMS_NORM_VERSIONS,
        "add_rms_norm": norm.ADD_RMS_NORM_VERSIONS,
        "qkv": qkv.VERSIONS,
        "attention": attention.VERSIONS,
        "gated": activation.VERSIONS,
        "router": router.VERSIONS,
        "experts": experts.VERSIONS,
        "softcap": softcap.VERSIONS,
    }
)

TYPICAL_SHAPE: Mapping[str, int] = types.MappingProxyType(
    {"in_features": 2048, "out_features": 2048, "inner_features": 2048, "head_dim": 128}
)
"""Sizes that most models have, for showing which versions would be chosen when there is no model at hand."""


def choose(op: str, device: torch.device, dtype: torch.dtype, deterministic: bool = False, **shape: Any) -> Choice:
    """The first version of `op` that can run here on these sizes. Deterministic takes batch-invariant ones only."""
    passed_over: list[tuple[Version, str]] = []
    for version in OPS[op]:
        objection = version.objection(device, dtype, deterministic, shape)
        if not objection:
            return Choice(version, tuple(passed_over))
        passed_over.append((version, objection))
    reasons = "; ".join(f"{version.name} {why}" for version, why in passed_over)
    mode = "deterministic " if deterministic else ""
    remedy = "Turn run.deterministic off, or run on another device." if deterministic else "Choose another dtype."
    raise ConfigError(f"No {mode}version of {op} runs on {device.type} in {short_name(dtype)}: {reasons}. {remedy}")
