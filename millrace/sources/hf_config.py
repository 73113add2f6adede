"""Reads a Hugging Face `config.json` as the flat dictionary that describes the text model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millrace.errors import ModelError

_TEXT_TYPES = {"gemma3": "gemma3_text"}
"""Model types of whole multi-modal models, and of the text model inside."""


def read_config(path: Path) -> dict[str, Any]:
    """The config, a nested `text_config` lifted to the top. Quantised checkpoints are refused."""
    config = flatten(read_json_object(path))
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type, so the model's family is unknown. Restore the model's own config.")
    method = config.get("quantization_config")
    if method:
        kind = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise ModelError(
            f"{path}: the weights are quantised by '{kind}', which cannot be served."
            " Use the unquantised model or a GGUF file of it."
        )
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"There is no {path.name} in {path.parent}; fetch the model's own {path.name} too.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__} instead of an object. Fetch it again.")
    return value


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Lift `text_config` to the top; its values win, and other parts (vision, audio) are left out."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {key: value for key, value in config.items() if not key.endswith("_config")}
    kind = config.get("model_type")
    flat = outer | {key: value for key, value in text.items() if value is not None or key not in outer}
    flat["model_type"] = text.get("model_type") or _TEXT_TYPES.get(str(kind), kind)
    if config.get("quantization_config"):
        flat["quantization_config"] = config["quantization_config"]
    return flat
