"""Derives the `rope_scaling` entry of a config from GGUF keys or, for Llama 3, from its table of frequency divisors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ModelError
from millrace.sources.gguf.metadata import Metadata

ROPE_FREQS = "rope_freqs.weight"
_RELATIVE_TOLERANCE = 1e-3

Divisors = npt.NDArray[np.float64]


def rope_scaling(meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    """None if positions are not scaled."""
    if ROPE_FREQS in meta.model:
        return _from_divisors(meta, head_dim)
    kind = meta.get("rope.scaling.type")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0)) or 1.0
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(meta, factor)
    raise meta.fail("rope.scaling.type", f"is {kind!r}; none, linear and yarn are supported")


def long_rope(meta: Metadata) -> dict[str, Any] | None:
    """Of files with divisors for short and for long texts; None for others."""
    if "rope_factors_short.weight" not in meta.model:
        return None
    short, long = (
        meta.model.data(f"rope_factors_{kind}.weight").view("<f4").astype(np.float64).tolist()
        for kind in ("short", "long")
    )
    found = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": meta.whole("rope.scaling.original_context_length"),
    }
    if meta.get("rope.scaling.attn_factor") is not None:
        found["attention_factor"] = meta.number("rope.scaling.attn_factor")
    return found


def _yarn(meta: Metadata, factor: float) -> dict[str, Any]:
    if meta.number("rope.scaling.yarn_ext_factor", 1.0) not in (-1.0, 1.0):
        raise meta.fail(
            "rope.scaling.yarn_ext_factor", f"is {meta.get('rope.scaling.yarn_ext_factor')}; only 1 is supported"
        )
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.whole(
            "rope.scaling.original_context_length", meta.whole("context_length")
        ),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if meta.get(f"rope.scaling.{key}") is not None:
            found[name] = meta.number(f"rope.scaling.{key}")
    attention = _yarn_attention_factor(meta, factor)
    if attention is not None:
        found["attention_factor"] = attention
    return found


def _yarn_attention_factor(meta: Metadata, factor: float) -> float | None:
    """The file's scale of rotated queries and keys; None = YaRN's default."""
    if meta.get("rope.scaling.yarn_attn_factor") is not None:
        return meta.number("rope.scaling.yarn_attn_factor")
    multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    extra = meta.number("rope.scaling.attn_factor", 1.0)
    if not multiplier and extra == 1.0:
        return None
    growth = 0.1 * math.log(factor) if factor > 1.0 else 0.0
    return extra * (1.0 + growth) / (1.0 + multiplier * growth)


def _from_divisors(meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    """Llama 3 files store a divisor per frequency. Recover the parameters that produce this table."""
    tensor = meta.model.tensor(ROPE_FREQS)
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{meta.model.path}: tensor '{ROPE_FREQS}' is {tensor.type.name} of shape {tensor.shape};"
            f" F32 of shape ({head_dim // 2},) is expected. Convert the model again."
        )
    divisors = meta.model.data(ROPE_FREQS).view("<f4").astype(np.float64)
    if np.all(divisors == 1.0):
        return None
    wavelengths = 2 * math.pi * meta.number("rope.freq_base", 10000.0) ** (np.arange(0, head_dim, 2) / head_dim)
    known = _llama3(float(np.max(divisors)), 1.0, 4.0, 8192)
    for candidate in (known, _fit(divisors, wavelengths)):
        if candidate is not None and _explains(candidate, divisors, wavelengths):
            return candidate
    raise ModelError(
        f"{meta.model.path}: tensor '{ROPE_FREQS}' does not follow the llama3 scaling rule, which is the only one"
        " supported. Use the model's safetensors files instead."
    )


def _llama3(factor: float, low: float, high: float, context: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _fit(divisors: Divisors, wavelengths: Divisors, context: int = 8192) -> dict[str, Any] | None:
    """Fit the linear part of the rule: smooth = context / (high - low) / wavelength - low / (high - low)."""
    factor = float(np.max(divisors))
    between = (divisors > 1.0) & (divisors < factor)
    if factor <= 1.0 or np.count_nonzero(between) < 2:
        return None
    smooth = (1.0 / divisors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(1.0 / wavelengths[between], smooth, 1)
    if not slope > 0:
        return None
    spread = context / float(slope)
    low = -float(offset) * spread
    return _llama3(factor, low, low + spread, context) if low > 0 else None


def _explains(rule: dict[str, Any], divisors: Divisors, wavelengths: Divisors) -> bool:
    low, high, context = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / rule["factor"] + smooth)
    return bool(np.allclose(expected, divisors, rtol=_RELATIVE_TOLERANCE, atol=0.0))
