"""Maps Hugging Face tensor names to pieces of GGUF tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from millrace.errors import ModelError
from millrace.sources.gguf.model import GgufModel

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight|.+\.(input_scale|scale)")
"""Rope factors are in the config; scales are applied with their weight; input scales are hints for 4-bit kernels."""
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>[a-z_]+)(\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")
_EXPERT_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
_PERMUTED_TYPES = ("llama", "mistral", "mixtral", "smollm3")


@dataclass(frozen=True, slots=True)
class GgufPiece:
    """Rows `first_row` to `first_row + num_rows` of a tensor, with all axes but the last flattened, seen as `shape`."""

    tensor: str
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    permuted_heads: int = 0
    """If not 0: number of heads whose rotary halves are interleaved and must be reordered."""
    minus_one: bool = False
    """The file holds weight + 1 (norms of the Gemma family)."""
    expert: int | None = None


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
    is_gemma = str(config["model_type"]).startswith("gemma")
    whole = _whole(model, tensor)
    if tensor in _GLOBAL:
        yield _GLOBAL[tensor], replace(whole, minus_one=is_gemma and tensor == "output_norm.weight")
        return
    match = _BLOCK.fullmatch(tensor)
    table = _GEMMA_LAYER if is_gemma else _LAYER
    if match is None:
        raise _unknown(model, config, tensor)
    prefix, part, kind = f"model.layers.{match['layer']}", match["part"], match["kind"]
    if match["expert"] is not None and part in _EXPERT_PARTS:
        yield _expert_name(config, prefix, part, int(match["expert"]), kind), whole
    elif part.removesuffix("_exps") in _EXPERT_PARTS and part.endswith("_exps"):
        yield from _experts(model, config, prefix, part.removesuffix("_exps"), whole)
    elif part == "ffn_gate_up_exps":
        yield from _fused_experts(model, config, prefix, whole)
    elif part == "attn_qkv":
        yield from _fused_attention(model, config, prefix, kind, whole)
    elif part in table and match["expert"] is None:
        own = _router(config) if part == "ffn_gate_inp" else table[part]
        minus_one = is_gemma and part.endswith("norm")
        yield f"{prefix}.{own}.{kind}", replace(whole, minus_one=minus_one, permuted_heads=_heads(config, part))
    else:
        raise _unknown(model, config, tensor)


def _whole(model: GgufModel, tensor: str) -> GgufPiece:
    """The whole tensor. A vector counts as rows of one item, so that items can be selected like rows."""
    shape = model.tensor(tensor).shape
    rows = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        rows *= size
    return GgufPiece(tensor, shape, 0, rows)


def _heads(config: dict[str, Any], part: str) -> int:
    """Number of heads to reorder: the llama architecture stores queries and keys for rotation of adjacent pairs."""
    if config["model_type"] not in _PERMUTED_TYPES:
        return 0
    count = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return int(count.get(part, 0))


def _router(config: dict[str, Any]) -> str:
    return "block_sparse_moe.gate" if config["model_type"] == "mixtral" else "mlp.gate"


def _expert_name(config: dict[str, Any], prefix: str, part: str, expert: int, kind: str = "weight") -> str:
    if config["model_type"] == "mixtral":
        own = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}[part]
        return f"{prefix}.block_sparse_moe.experts.{expert}.{own}.{kind}"
    return f"{prefix}.mlp.experts.{expert}.{_LAYER[part].removeprefix('mlp.')}.{kind}"


def _experts(
    model: GgufModel, config: dict[str, Any], prefix: str, part: str, whole: GgufPiece
) -> Iterator[tuple[str, GgufPiece]]:
    count = _num_experts(model, config, whole)
    rows = whole.num_rows // count
    for expert in range(count):
        own = replace(whole, shape=whole.shape[1:], first_row=expert * rows, num_rows=rows, expert=expert)
        yield _expert_name(config, prefix, part, expert), own


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


def _num_experts(model: GgufModel, config: dict[str, Any], whole: GgufPiece) -> int:
    count = config.get("num_local_experts") or config.get("num_experts") or 0
    if len(whole.shape) != 3 or whole.shape[0] != count:
        raise ModelError(
            f"{model.path}: tensor '{whole.tensor}' has shape {whole.shape}; {count} experts need {count} as its first"
            " of three axes. Convert the model again."
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
