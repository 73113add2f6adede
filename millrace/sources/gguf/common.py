"""What the metadata of all architectures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.errors import ModelError
from millrace.sources.gguf.metadata import Metadata
from millrace.sources.gguf.rope import rope_scaling

MAX_LAYERS = 1024
EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
"""Epsilon of RMS norms, and of layer norms, which the config has as `rms_norm_eps`, too."""

_NEUTRAL: dict[str, float] = {
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.clamp_kqv": 0.0,
    "attention.temperature_scale": 0.0,
    "attention.max_alibi_bias": 0.0,
}
"""Parameters that no supported family uses, with the value that has no effect. Other values are refused."""


def common(
    meta: Metadata,
    model_type: str,
    architecture: str,
    rotary_share: float = 1.0,
    allowed: Sequence[str] = (),
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """`rotary_share`: of a head's dimensions. `allowed`: of the parameters in _NEUTRAL. `num_kv_heads`: where the file
    says them for each layer."""
    hidden, heads = meta.whole("embedding_length"), meta.whole("attention.head_count")
    head_dim = meta.whole("attention.key_length", hidden // heads)
    rotary_dim = int(head_dim * rotary_share)
    _check_head(meta, hidden, heads, head_dim, rotary_dim)
    if meta.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise meta.fail("expert_weights_scale", f"is {meta.get('expert_weights_scale')}; only 1 is supported")
    if meta.whole("expert_shared_count", 0, minimum=0):
        raise meta.fail("expert_shared_count", "is not 0; shared experts are not supported")
    return {**described(meta, model_type, architecture, rotary_dim, allowed, num_kv_heads), "head_dim": head_dim}


def described(
    meta: Metadata,
    model_type: str,
    architecture: str,
    rotary_dim: int,
    allowed: Sequence[str] = (),
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """What every family has, whatever its attention."""
    _refuse_unsupported(meta, allowed)
    hidden, heads = meta.whole("embedding_length"), meta.whole("attention.head_count")
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": _num_layers(meta),
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads or meta.whole("attention.head_count_kv", heads),
        "max_position_embeddings": meta.whole("context_length"),
        "rms_norm_eps": meta.number(EPS if meta.get(LAYER_EPS) is None else LAYER_EPS),
        "vocab_size": _vocab_size(meta),
        "tie_word_embeddings": "output.weight" not in meta.model,
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(meta, rotary_dim),
        "hidden_act": "silu",
        **_special_tokens(meta),
    }


def _refuse_unsupported(meta: Metadata, allowed: Sequence[str]) -> None:
    for key, neutral in _NEUTRAL.items():
        if key not in allowed and meta.number(key, neutral) != neutral:
            raise meta.fail(key, f"is {meta.get(key)}; only {neutral:g} is supported")
    if meta.whole("nextn_predict_layers", 0, minimum=0):
        raise meta.fail("nextn_predict_layers", "is not 0; layers that predict several tokens are not supported")


def _num_layers(meta: Metadata) -> int:
    count = meta.whole("block_count")
    if count > MAX_LAYERS:
        raise meta.fail("block_count", f"is {count}, above the limit of {MAX_LAYERS}")
    return count


def _check_head(meta: Metadata, hidden: int, heads: int, head_dim: int, rotary_dim: int) -> None:
    if head_dim < 1:
        raise meta.fail("attention.head_count", f"is {heads}, above embedding_length {hidden}")
    if meta.whole("attention.value_length", head_dim) != head_dim:
        found = meta.get("attention.value_length")
        raise meta.fail("attention.value_length", f"is {found} and the head size is {head_dim}; they must be equal")
    if meta.whole("rope.dimension_count", rotary_dim) != rotary_dim:
        found = meta.get("rope.dimension_count")
        raise meta.fail("rope.dimension_count", f"is {found}; heads of {head_dim} rotate {rotary_dim} dimensions")


def _vocab_size(meta: Metadata) -> int:
    if "token_embd.weight" not in meta.model:
        raise ModelError(
            f"{meta.model.path} has no tensor 'token_embd.weight', so it is not a complete language model."
        )
    return meta.model.tensor("token_embd.weight").shape[0]


def _special_tokens(meta: Metadata) -> dict[str, Any]:
    ends = [meta.token_id(name) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(token for token in ends if token is not None))
    found: dict[str, Any] = {"bos_token_id": meta.token_id("bos"), "pad_token_id": meta.token_id("padding")}
    found["eos_token_id"] = unique[0] if len(unique) == 1 else unique or None
    return found


def has_bias(meta: Metadata, part: str) -> bool:
    return f"blk.0.{part}.bias" in meta.model
