"""Maps Hugging Face tensor names to pieces of GGUF tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from millrace.errors import ModelError
from millrace.models.weights.gguf_piece import GgufPiece, whole_piece
from millrace.sources.gguf.model import GgufModel

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LATENT_LAYER = _LAYER | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_LFM2_LAYER = _LAYER | {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
_TABLES = {
    "gemma2": _GEMMA_LAYER,
    "gemma3_text": _GEMMA_LAYER,
    "mixtral": _LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
    "olmo2": _LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": _LAYER
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "phi3": _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": _LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    "seed_oss": _LAYER | {"post_attention_norm": "post_attention_layernorm"},
    "lfm2": _LFM2_LAYER,
    "lfm2_moe": _LFM2_LAYER | {"exp_probs_b": "mlp.gate.e_score_correction_bias"},
    "deepseek_v2": _LATENT_LAYER,
    "deepseek_v3": _LATENT_LAYER,
}
"""Names of a layer's tensors in families that differ from `_LAYER`."""
_WITHOUT_KIND = ("attn_sinks", "exp_probs_b")
"""Tensors whose Hugging Face names do not end in `.weight` or `.bias`."""
_UNUSED = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight|.+\.(input_scale|scale)"
)
"""Rope factors are in the config; scales are applied with their weight; input scales are hints for 4-bit kernels."""
_BLOCK = re.compile(
    r"blk\.(?P<layer>\d+)\.(?P<part>(?:shortconv\.)?[a-z_]+)(\.(?P<expert>\d+))?\.(?P<kind>weight|bias)"
)
_EXPERT_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
_PERMUTED_TYPES = ("llama", "mistral", "mixtral", "smollm3", "granite", "granitemoe", "arcee", "olmo")
_WITH_OFFSET = ("gemma", "nemotron")
"""Beginnings of the model types whose files hold 1 + w for the weights of norms."""


def pieces_by_name(model: GgufModel, config: dict[str, Any]) -> dict[str, GgufPiece]:
    """Every Hugging Face tensor in the file. A tensor that the family does not have is an error."""
    found: dict[str, GgufPiece] = {}
    for tensor in model.names():
        if _UNUSED.fullmatch(tensor):
            continue
        for name, piece in _pieces_of(model, config, tensor):
            if name in found:
                raise ModelError(f"{model.path}: tensors '{found[name].tensor}' and '{tensor}' are both {name}.")
            found[name] = piece
    return found


def _pieces_of(model: GgufModel, config: dict[str, Any], tensor: str) -> Iterator[tuple[str, GgufPiece]]:
    kind_of_model = str(config["model_type"])
    has_offset = kind_of_model.startswith(_WITH_OFFSET)
    whole = whole_piece(model, tensor)
    if tensor in _GLOBAL:
        yield _GLOBAL[tensor], replace(whole, minus_one=has_offset and tensor == "output_norm.weight")
        return
    match = _BLOCK.fullmatch(tensor)
    table = _TABLES.get(kind_of_model, _LAYER)
    if match is None:
        raise _unknown(model, config, tensor)
    prefix, part, kind = f"model.layers.{match['layer']}", match["part"], match["kind"]
    if match["expert"] is not None and part in _EXPERT_PARTS:
        yield _expert_name(config, prefix, part, int(match["expert"]), kind), whole
    elif part.removesuffix("_exps") in _EXPERT_PARTS and part.endswith("_exps"):
        yield from _experts(model, config, prefix, part.removesuffix("_exps"), kind, whole)
    elif part == "ffn_gate_up_exps":
        yield from _fused_experts(model, config, prefix, whole)
    elif part == "attn_qkv" and part not in table:
        yield from _fused_attention(model, config, prefix, kind, whole)
    elif part in ("attn_k_b", "attn_v_b") and "attn_kv_b" in table:
        yield from _keys_and_values(model, config, prefix, tensor, whole)
    elif part in table and match["expert"] is None:
        name = f"{prefix}.{table[part]}" + ("" if part in _WITHOUT_KIND else f".{kind}")
        if part == "shortconv.conv" and kind == "weight":
            whole = replace(whole, shape=(whole.num_rows, 1, whole.shape[-1]))
        minus_one = has_offset and part.endswith("norm") and kind == "weight"
        yield name, replace(whole, minus_one=minus_one, permuted_heads=_heads(config, part))
    else:
        raise _unknown(model, config, tensor)


def _heads(config: dict[str, Any], part: str) -> int:
    """Number of heads to reorder: the llama architecture stores queries and keys for rotation of adjacent pairs."""
    if config["model_type"] not in _PERMUTED_TYPES:
        return 0
    count = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return int(count.get(part, 0))


def _keys_and_values(
    model: GgufModel, config: dict[str, Any], prefix: str, tensor: str, whole: GgufPiece
) -> Iterator[tuple[str, GgufPiece]]:
    """Some files have both forms."""
    values = tensor.replace("attn_k_b", "attn_v_b")
    if tensor == values or tensor.replace("attn_k_b", "attn_kv_b") in model:
        return
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    keys_shape = (heads, rank, config["qk_nope_head_dim"])
    values_shape = (heads, config["v_head_dim"], rank)
    for name, shape in ((tensor, keys_shape), (values, values_shape)):
        if model.tensor(name).shape != shape:
            raise ModelError(
                f"{model.path}: tensor '{name}' has shape {model.tensor(name).shape}; the metadata need {shape}."
                " Convert the model again."
            )
    rows = heads * (keys_shape[2] + values_shape[1])
    yield f"{prefix}.{_LATENT_LAYER['attn_kv_b']}.weight", replace(whole, shape=(rows, rank), values=values)


def _expert_name(config: dict[str, Any], prefix: str, part: str, expert: int, kind: str = "weight") -> str:
    if config["model_type"] == "mixtral":
        own = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}[part]
        return f"{prefix}.block_sparse_moe.experts.{expert}.{own}.{kind}"
    return f"{prefix}.mlp.experts.{expert}.{_LAYER[part].removeprefix('mlp.')}.{kind}"


def _experts(
    model: GgufModel, config: dict[str, Any], prefix: str, part: str, kind: str, whole: GgufPiece
) -> Iterator[tuple[str, GgufPiece]]:
    """A bias is one row for each expert."""
    count = _num_experts(model, config, whole, num_axes=2 if kind == "bias" else 3)
    rows = whole.num_rows // count
    for expert in range(count):
        own = replace(whole, shape=whole.shape[1:], first_row=expert * rows, num_rows=rows, expert=expert)
        yield _expert_name(config, prefix, part, expert, kind), own


def _fused_experts(
    model: GgufModel, config: dict[str, Any], prefix: str, whole: GgufPiece
) -> Iterator[tuple[str, GgufPiece]]:
    """One tensor [experts, gate rows then up rows, width]."""
    count = _num_experts(model, config, whole)
    rows = whole.num_rows // count // 2
    for expert in range(count):
        for half, part in enumerate(("ffn_gate", "ffn_up")):
            first = (2 * expert + half) * rows
            own = replace(whole, shape=(rows, whole.shape[-1]), first_row=first, num_rows=rows, expert=expert)
            yield _expert_name(config, prefix, part, expert), own


def _num_experts(model: GgufModel, config: dict[str, Any], whole: GgufPiece, num_axes: int = 3) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), 0)
    if len(whole.shape) != num_axes or whole.shape[0] != count:
        raise ModelError(
            f"{model.path}: tensor '{whole.tensor}' has shape {whole.shape}; {count} experts need {count} as its first"
            f" of {num_axes} axes. Convert the model again."
        )
    return int(count)


def _fused_attention(
    model: GgufModel, config: dict[str, Any], prefix: str, kind: str, whole: GgufPiece
) -> Iterator[tuple[str, GgufPiece]]:
    head_dim, kv_rows = config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    sizes = {"attn_q": config["num_attention_heads"] * head_dim, "attn_k": kv_rows, "attn_v": kv_rows}
    if sum(sizes.values()) != whole.num_rows:
        raise ModelError(
            f"{model.path}: tensor '{whole.tensor}' has {whole.num_rows} rows; queries, keys and values need"
            f" {sum(sizes.values())}. Convert the model again."
        )
    first = 0
    for part, rows in sizes.items():
        own = replace(whole, shape=(rows, *whole.shape[1:]), first_row=first, num_rows=rows)
        yield f"{prefix}.{_LAYER[part]}.{kind}", replace(own, permuted_heads=_heads(config, part))
        first += rows


def _unknown(model: GgufModel, config: dict[str, Any], tensor: str) -> ModelError:
    return ModelError(
        f"{model.file_of(tensor).path}: tensor '{tensor}' does not belong to a {config['model_type']} model,"
        " so the output would be wrong. Use a file of a supported family."
    )
