"""Writes small GGUF files: from metadata and arrays, or from a Hugging Face model as a converter would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

Array = npt.NDArray[Any]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array | tuple[Array, GGMLQuantizationType]],
    arch: str = "llama",
) -> Path:
    """Tensors are float arrays, or raw bytes [..., row_bytes] with their type. Floats are written as 32 bits."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, given in tensors.items():
        if isinstance(given, tuple):
            writer.add_tensor(name, np.ascontiguousarray(given[0]), raw_dtype=given[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(given))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY)


LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def permute(weight: Array, num_heads: int) -> Array:
    """The llama layout: within each head, row i of the first half is followed by row i of the second."""
    head_dim = weight.shape[0] // num_heads
    order = [half * head_dim // 2 + i for i in range(head_dim // 2) for half in (0, 1)]
    return np.concatenate([weight[h * head_dim : (h + 1) * head_dim][order] for h in range(num_heads)])


def convert_state(state: Mapping[str, Any], arch: str, num_heads: int, num_kv_heads: int) -> dict[str, Array]:
    """A transformers state dict as GGUF arrays in float32: names, interleaved heads, norms plus one for Gemma."""
    is_gemma, is_llama = arch.startswith("gemma"), arch in ("llama", "smollm3")
    names = GEMMA_NAMES if is_gemma else LAYER_NAMES
    converted: dict[str, Array] = {}
    for name, tensor in state.items():
        array = tensor.detach().float().numpy()
        if is_gemma and name.endswith("norm.weight"):
            array = array + 1.0
        if is_llama and re.search(r"\.[qk]_proj\.", name):
            array = permute(array, num_heads if ".q_proj." in name else num_kv_heads)
        if name in GLOBAL_NAMES:
            converted[GLOBAL_NAMES[name]] = array
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
        assert match is not None, name
        converted[f"blk.{match[1]}.{names[match[2]]}{match[3] or '.weight'}"] = array
    return converted


def split_fused_experts(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The usual form of experts: gate and up in separate tensors."""
    found: dict[str, Array] = {}
    for name, array in tensors.items():
        if "ffn_gate_up_exps" in name:
            gate, up = np.split(array, 2, axis=1)
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = gate, up
        else:
            found[name] = array
    return found
