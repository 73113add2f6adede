"""Lists every op with its versions, best first, and chooses one of them when a model is loaded."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

from millrace.errors import ConfigError
from millrace.ops import attention
from millrace.ops.attention import latent, latent_qkv, qkv, texts
from millrace.ops.base.version import Choice, Version, dtype_name
from millrace.ops.elementwise import activation, biased, norm, softcap
from millrace.ops.head import embedding
from millrace.ops.linear import dense, fp8, gated, grouped, packed_codes, per_head, stored
from millrace.ops.lora import add
from millrace.ops.moe import experts, limited_router, router, stored_experts
from millrace.ops.recurrent import conv, recurrence

OPS: Mapping[str, tuple[Version, ...]] = types.MappingProxyType(
    {
        "embedding": embedding.VERSIONS,
        "tied_embedding": embedding.TIED_VERSIONS,
        "linear": dense.VERSIONS,
        "stored_linear": stored.VERSIONS,
        "grouped_linear": (*packed_codes.VERSIONS, *grouped.VERSIONS),
        "fp8_linear": fp8.VERSIONS,
        "gated_linear": gated.VERSIONS,
        "rms_norm": norm.RMS_NORM_VERSIONS,
        "add_rms_norm": norm.ADD_RMS_NORM_VERSIONS,
        "layer_norm": norm.LAYER_NORM_VERSIONS,
        "add_layer_norm": norm.ADD_LAYER_NORM_VERSIONS,
        "qkv": qkv.VERSIONS,
        "attention": attention.VERSIONS,
        "latent_attention": latent.VERSIONS,
        "latent_qkv": latent_qkv.VERSIONS,
        "per_head_linear": per_head.VERSIONS,
        "gated": activation.VERSIONS,
        "activation": activation.PLAIN_VERSIONS,
        "router": router.VERSIONS,
        "limited_router": limited_router.VERSIONS,
        "experts": (*stored_experts.VERSIONS, *experts.VERSIONS),
        "causal_conv": conv.VERSIONS,
        "recurrence": recurrence.VERSIONS,
        "softcap": softcap.VERSIONS,
        "text_attention": texts.VERSIONS,
        "bias_activation": biased.ACTIVATION_VERSIONS,
        "bias_layer_norm": biased.NORM_VERSIONS,
        "add_lora": add.VERSIONS,
    }
)

TYPICAL_SHAPE: Mapping[str, int] = types.MappingProxyType(
    {"in_features": 2048, "out_features": 2048, "inner_features": 2048, "head_dim": 128}
)
"""Typical sizes, used to show which versions would be chosen when no model is loaded."""


def choose(op: str, device: torch.device, dtype: torch.dtype, deterministic: bool = False, **shape: Any) -> Choice:
    """The first version of `op` that supports this device, dtype and shape; if `deterministic`, batch-invariant ones
    only."""
    rejected: list[tuple[Version, str]] = []
    for version in OPS[op]:
        reject_reason = version.reject_reason(device, dtype, deterministic, shape)
        if not reject_reason:
            return Choice(version, tuple(rejected))
        rejected.append((version, reject_reason))
    reasons = "; ".join(f"{version.name} {reason}" for version, reason in rejected)
    mode = "deterministic " if deterministic else ""
    remedy = "Turn run.deterministic off, or run on another device." if deterministic else "Choose another dtype."
    raise ConfigError(f"No {mode}version of {op} runs on {device.type} in {dtype_name(dtype)}: {reasons}. {remedy}")
