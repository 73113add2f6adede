"""Small drafters in the formats that others publish, and their meaning: plain torch in float64, one token at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 80, 6, 2, 16
Tensors = dict[str, torch.Tensor]


def layer_config(vocab_size: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "max_position_embeddings": 64,
        "vocab_size": vocab_size,
        **changes,
    }


def draw(*shape: int, centre: float = 0.0) -> torch.Tensor:
    return centre + 0.2 * torch.randn(*shape)


def layer_tensors(prefix: str, in_features: int = HIDDEN, *, input_norm: bool = True) -> Tensors:
    found = {
        "self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, in_features),
        "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, in_features),
        "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, in_features),
        "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm.weight": draw(HIDDEN, centre=1.0),
        "mlp.gate_proj.weight": draw(INNER, HIDDEN),
        "mlp.up_proj.weight": draw(INNER, HIDDEN),
        "mlp.down_proj.weight": draw(HIDDEN, INNER),
    }
    if input_norm:
        found["input_layernorm.weight"] = draw(HIDDEN, centre=1.0)
    return {prefix + name: tensor for name, tensor in found.items()}


def token_maps(draft_size: int, vocab_size: int) -> tuple[Tensors, torch.Tensor]:
    """(d2t and t2d, the token id of each draft id)."""
    ids = torch.randperm(vocab_size)[:draft_size].sort().values
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(draft_size), "t2d": known}, ids


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


# --- the meaning ---


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight.double()


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [heads, head_dim] as complex numbers, turned by the position."""
    half = HEAD_DIM // 2
    turns = position * 500.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((turned.real, turned.imag), dim=-1)


@dataclass
class Layer:
    """One Llama layer that keeps the keys and values it has seen."""

    tensors: Tensors
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, position: int) -> torch.Tensor:
        w = {name: tensor.double() for name, tensor in self.tensors.items()}
        query = rotated((w["self_attn.q_proj.weight"] @ x).view(HEADS, HEAD_DIM), position)
        self.keys.append(rotated((w["self_attn.k_proj.weight"] @ x).view(KV_HEADS, HEAD_DIM), position))
        self.values.append((w["self_attn.v_proj.weight"] @ x).view(KV_HEADS, HEAD_DIM))
        mixed = []
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            scores = torch.stack([query[head] @ key[own] for key in self.keys]) / HEAD_DIM**0.5
            mixed.append(scores.softmax(0) @ torch.stack([value[own] for value in self.values]))
        residual = residual + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = norm(residual, w["post_attention_layernorm.weight"])
        gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
        return residual + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
