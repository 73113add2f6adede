"""Checkpoints that take pictures or sounds beside text, of which the language model is loaded alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_IN_PART = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("AyaVision", "Cohere2Vision", "Gemma3", "Idefics3", "InternVL", "Lfm2Vl", "Llama4", "Llava", "LlavaNext"),
        *("LlavaOnevision", "Mistral3", "PerceptionLM", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5"),
        *("Qwen3_5Moe", "SmolVLM", "VipLlava", "Voxtral"),
    )
)
"""Architectures whose language model reads text as it would alone; its `model_type` says which it is."""


def is_multimodal(config: Mapping[str, Any]) -> bool:
    return any(name in TEXT_IN_PART for name in config.get("architectures") or [])
