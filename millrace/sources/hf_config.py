"""Reads a Hugging Face `config.json` as a flat dictionary of the text model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ModelError

QUANTISED_BY = (
    *("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "bitsandbytes", "torchao", "mxfp4", "modelopt"),
    *("modelopt_fp4", "quark", "hqq"),
)
"""Methods of quantised checkpoints that can be loaded (models/formats)."""
SETTINGS_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in which some tools write the settings instead of `quantization_config`, and their method."""
_TEXT_TYPES = {"gemma3": "gemma3_text"}
"""Model type of a multimodal model to that of its text model."""
TEXT_IN_PART = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("AyaVision", "Cohere2Vision", "Gemma3", "Idefics3", "InternVL", "Lfm2Vl", "Llama4", "Llava", "LlavaNext"),
        *("LlavaOnevision", "Mistral3", "PerceptionLM", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5"),
        *("Qwen3_5Moe", "SmolVLM", "VipLlava", "Voxtral"),
    )
)
"""Architectures whose language model reads text as it would alone; its `model_type` says which it is."""


def read_config(path: Path) -> dict[str, Any]:
    """The config, with a nested `text_config` moved to the top level. Raises for quantised checkpoints of a method that
    is not supported."""
    config = flatten(read_json_object(path))
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path} has no model_type, so the model's family is unknown. Download the model's config.json again."
        )
    quantised = config.get("quantization_config")
    if not quantised and config.get("compression_config"):  # the older name
        quantised = config["quantization_config"] = config["compression_config"]
    if not quantised:
        quantised = _settings_beside(path.parent)
        if quantised:
            config["quantization_config"] = quantised
    if quantised:
        kind = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        if kind not in QUANTISED_BY:
            raise ModelError(
                f"{path}: the weights are quantised with '{kind}', which is not supported. Use a checkpoint quantised"
                f" with {', '.join(QUANTISED_BY)}, a GGUF file, or the unquantised model."
            )
    return config


def _settings_beside(folder: Path) -> dict[str, Any]:
    for name, method in SETTINGS_BESIDE.items():
        if (folder / name).is_file():
            return {"quant_method": method, **read_json_object(folder / name)}
    return {}


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"There is no {path.name} in {path.parent}; download the model's {path.name} too.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains a JSON {type(value).__name__} instead of an object. Download it again.")
    return value


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Move `text_config` to the top level, where its values take precedence. Drops other parts (vision, audio)."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {key: value for key, value in config.items() if not key.endswith("_config")}
    kind = config.get("model_type")
    flat = outer | {key: value for key, value in text.items() if value is not None or key not in outer}
    if "tie_word_embeddings" in config:  # The head belongs to the whole model.
        flat["tie_word_embeddings"] = config["tie_word_embeddings"]
    flat["model_type"] = text.get("model_type") or _TEXT_TYPES.get(str(kind), kind)
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            flat[key] = config[key]
    return flat


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """True for a checkpoint that takes pictures or sounds beside text, of which the language model is loaded alone."""
    return any(name in TEXT_IN_PART for name in config.get("architectures") or [])
