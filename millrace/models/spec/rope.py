"""RoPE variants: from a config's rope entries to a RopeSpec, and from a RopeSpec to frequencies.

Frequencies are computed in float32 with the same operations as the reference implementation, because a rounding error
grows with the position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.model_spec import RopeSpec

_SUPPORTED = "default, linear, dynamic, llama3, yarn, longrope, divisors"


ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
"""Of a config: what `read_rope` reads."""


def read_rope(config: Mapping[str, Any], head_dim: int, default_theta: float, layer_type: str = "") -> RopeSpec:
    """The rope of a layer type, from `rope_parameters` (one for all layers, or one per type), else from `rope_theta`
    and `rope_scaling`."""
    entries = {**config, **(config.get("rope_scaling") or {}), **_parameters(config, layer_type)}
    reader = ConfigReader(entries)
    theta = reader.positive("rope_theta", default_theta)
    rotary_dim = int(head_dim * reader.positive("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise reader.fail(
            "partial_rotary_factor", f"gives {rotary_dim} rotated dimensions of {head_dim}; it must be an even number"
        )
    kind = reader.get("rope_type") or reader.get("type") or "default"
    if kind == "dynamic" and reader.has("alpha") and rotary_dim > 2:  # Another base, whatever the length of the text.
        theta *= reader.positive("alpha") ** (rotary_dim / (rotary_dim - 2))
    base = RopeSpec(rotary_dim, theta)
    if kind in ("default", "mrope", "dynamic"):
        # The three positions of mrope are equal in texts.
        # Dynamic NTK changes frequencies only beyond max_position_embeddings, the longest context that is served.
        return base
    if kind == "linear":
        return RopeSpec(rotary_dim, theta, "linear", factor=reader.positive("factor"))
    if kind == "llama3":
        return _read_llama3(reader, base)
    if kind == "yarn":
        return _read_yarn(reader, base)
    if kind in ("longrope", "su"):
        return _read_longrope(reader, base)
    if kind == "divisors":
        return RopeSpec(rotary_dim, theta, "divisors", divisors=_read_divisors(reader, rotary_dim))
    raise ModelError(f"The model's config has rope type {kind!r}, which is not supported. Supported: {_SUPPORTED}.")


def _parameters(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters") or {}
    nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    return nested.get(layer_type) or ({} if nested else parameters)


def _original_context(reader: ConfigReader) -> int:
    return reader.whole("original_max_position_embeddings", reader.whole("max_position_embeddings"))


def _read_llama3(reader: ConfigReader, base: RopeSpec) -> RopeSpec:
    return RopeSpec(
        base.rotary_dim,
        base.theta,
        "llama3",
        factor=reader.positive("factor"),
        original_context=_original_context(reader),
        low_freq_factor=reader.positive("low_freq_factor"),
        high_freq_factor=reader.positive("high_freq_factor"),
    )


def _read_yarn(reader: ConfigReader, base: RopeSpec) -> RopeSpec:
    original = _original_context(reader)
    factor = reader.positive("factor", reader.whole("max_position_embeddings") / original)
    return RopeSpec(
        base.rotary_dim,
        base.theta,
        "yarn",
        factor=factor,
        original_context=original,
        beta_fast=reader.positive("beta_fast", 32.0),
        beta_slow=reader.positive("beta_slow", 1.0),
        truncate=reader.flag("truncate", True),
        attention_factor=_yarn_attention_factor(reader, factor),
    )


def _read_longrope(reader: ConfigReader, base: RopeSpec) -> RopeSpec:
    """Texts up to the trained context have other frequencies than longer ones, for which all keys would have to be
    computed again. Here they have those of short ones, and the trained context is the limit."""
    original = _original_context(reader)
    factor = reader.positive("factor", reader.whole("max_position_embeddings") / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeSpec(
        base.rotary_dim,
        base.theta,
        "divisors",
        original_context=original,
        attention_factor=reader.positive("attention_factor", growth),
        divisors=_read_divisors(reader, base.rotary_dim, "short_factor"),
    )


def _read_divisors(reader: ConfigReader, rotary_dim: int, key: str = "divisors") -> tuple[float, ...]:
    """The divisor of each frequency."""
    values = reader.get(key)
    if not isinstance(values, list) or len(values) != rotary_dim // 2 or not all(float(value) > 0 for value in values):
        raise reader.fail(key, f"must be a list of {rotary_dim // 2} numbers above 0")
    return tuple(float(value) for value in values)


def _yarn_attention_factor(reader: ConfigReader, factor: float) -> float:
    if reader.has("attention_factor"):
        return reader.positive("attention_factor")
    growth = 0.1 * math.log(factor) if factor > 1.0 else 0.0
    mscale, mscale_all = reader.number("mscale", 0.0), reader.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return (1.0 + mscale * growth) / (1.0 + mscale_all * growth)
    return 1.0 + growth


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """float32 [rotary_dim / 2], in radians per position."""
    periods = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(periods, rope)
    if rope.kind == "divisors":
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    return plain


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    slowed = torch.where(wavelengths > longest, plain / rope.factor, plain)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, slowed)


def _yarn(periods: Tensor, rope: RopeSpec) -> Tensor:
    """A ramp over the dimensions, from frequencies kept (high) to frequencies divided by `factor` (low)."""

    def dimension_of(turns: float) -> float:
        within = math.log(rope.original_context / (turns * 2 * math.pi))
        return rope.rotary_dim * within / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept
