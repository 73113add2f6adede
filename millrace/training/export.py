"""Writes a trained drafter as others can load it: model.safetensors, config.json, and for draft models a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from millrace.models.drafters.spec import DrafterSpec
from millrace.models.spec.model_spec import ModelSpec, RopeSpec
from millrace.training.tasks.task import Task

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def export_drafter(
    folder: Path, task: Task, token_ids: Tensor | None, target_config: dict[str, Any], notes: dict[str, Any]
) -> int:
    """Write the drafter in bfloat16; the size of its file. `notes` go to config.json under "millrace"."""
    tensors = {name: _stored(tensor) for name, tensor in _names(task.spec, task.module.state_dict()).items()}
    tensors |= _maps(task.spec, token_ids)
    config = {**_config(task.spec, target_config), "torch_dtype": "bfloat16", "millrace": notes}
    path = folder / MODEL_FILE
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path.stat().st_size


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16).contiguous()


def _names(spec: DrafterSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names that the published formats use."""
    if spec.kind == "draft":
        return state
    if spec.kind == "eagle":
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}
    found = {}
    for name, tensor in state.items():
        parts = name.split(".")
        found[f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "heads" else name] = tensor
    return found


def _maps(spec: DrafterSpec, token_ids: Tensor | None) -> dict[str, Tensor]:
    if token_ids is None:
        return {}
    ids = token_ids.cpu()
    if spec.kind == "medusa":
        return {"token_map": ids}
    is_known = torch.zeros(spec.vocab_size, dtype=torch.bool)
    is_known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": is_known}


def _config(spec: DrafterSpec, target_config: dict[str, Any]) -> dict[str, Any]:
    if spec.kind == "medusa":
        return {
            "model_type": "medusa",
            "medusa_num_heads": spec.num_medusa_heads,
            "medusa_num_layers": spec.num_medusa_blocks,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": spec.draft_vocab_size,
        }
    assert spec.decoder is not None
    if spec.kind == "draft":
        dropped = ("layer_types", "quantization_config")
        config = {key: value for key, value in target_config.items() if key not in dropped}
        return {**config, "num_hidden_layers": spec.decoder.num_layers}
    return {**_llama_config(spec.decoder), "draft_vocab_size": spec.draft_vocab_size}


def _llama_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.inner_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_context,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        **_rope_config(spec.ropes[0], spec.head_dim),
    }


def _rope_config(rope: RopeSpec, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rotary_dim != head_dim:
        found["partial_rotary_factor"] = rope.rotary_dim / head_dim
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "default":
        return found
    if rope.kind == "divisors":
        scaling["divisors"] = list(rope.divisors)
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling["attention_factor"] = rope.attention_factor
    return {**found, "rope_scaling": scaling}
