"""Adapters as PEFT saves them, with random matrices, and an oracle that merges them into the weights by hand."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    *,
    rank: int,
    targets: Sequence[str] = ATTENTION,
    alpha: float = 16.0,
    rslora: bool = False,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    seed: int = 0,
    size: float = 0.3,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **further: Any,
) -> Path:
    """Of a `transformers` model. `size`: standard deviation of B."""
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": list(targets),
        "rank_pattern": rank_pattern or {},
        "alpha_pattern": alpha_pattern or {},
        "bias": "none",
        "use_dora": False,
        **further,
    }
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        is_target = isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in targets
        if not is_target or (layers is not None and int(name.split(".")[2]) not in layers):
            continue
        own = next((r for end, r in (rank_pattern or {}).items() if name.endswith(end)), rank)
        outputs, inputs = module.weight.shape
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(own, inputs, generator=random) / math.sqrt(inputs)
        tensors[f"{prefix}.lora_B.weight"] = size * torch.randn(outputs, own, generator=random) / math.sqrt(own)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: one.to(dtype) for name, one in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of the model with W + scale · B A, computed here and nowhere else."""
    from safetensors.torch import load_file

    config, found = json.loads((folder / "adapter_config.json").read_text()), copy.deepcopy(model)
    tensors, parameters = load_file(folder / "adapter_model.safetensors"), dict(found.named_parameters())
    for key, a in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b, rank = tensors[key.replace(".lora_A.", ".lora_B.")], a.shape[0]
        alpha = next((v for end, v in config["alpha_pattern"].items() if name.endswith(end)), config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        with torch.no_grad():
            parameters[f"{name}.weight"] += (scale * (b.double() @ a.double())).float()
    return found


def greedy(model: Any, prompt: Sequence[int], count: int, allowed: range | None = None) -> list[int]:
    """`allowed`: the token ids to choose from; None: all."""
    tokens, first = list(prompt), 0 if allowed is None else allowed.start
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(first + int((logits if allowed is None else logits[first : allowed.stop]).argmax()))
    return tokens[len(prompt) :]
