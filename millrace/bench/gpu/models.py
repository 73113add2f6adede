"""The models of `millrace bench gpu`: shapes with random weights, by name or path, with suffixes for settings.

`llama-3.1-8b+fp8` is the shape `llama-3.1-8b` with FP8 weights, `llama-3.1-8b+fp8+fp8kv` also with an FP8 KV cache;
`llama-3.1-8b+fullkv` has an unpacked KV cache, `qwen3-0.6b+deterministic` runs in deterministic mode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.config import Config, LoadedConfig, load_config
from millrace.errors import ConfigError

SHAPES_DIR = Path(__file__).with_name("shapes")
DEFAULT_MODELS = ("llama-3.1-8b", "llama-3.1-8b+fp8", "qwen3-0.6b", "qwen3-30b-a3b")

SUFFIXES: Mapping[str, tuple[str, object]] = {
    "fp8": ("model.quantization", "fp8"),
    "fp8kv": ("memory.kv_dtype", "fp8"),
    "int4kv": ("memory.kv_dtype", "int4"),
    "fullkv": ("memory.kv_dtype", "full"),
    "deterministic": ("run.deterministic", True),
}
"""The setting and value that each suffix stands for."""

MAX_RUNNING, MAX_CONTEXT = 512, 33792
"""Defaults of this benchmark, equal to the peer's setup."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    label: str
    """Name in the JSON lines: the shape with its suffixes."""
    config: Config


def known_shapes(directory: Path | None = None) -> dict[str, Path]:
    """Shape files by name: those of Millrace, overridden by *.json and */config.json in `directory`."""
    found = {path.stem: path for path in sorted(SHAPES_DIR.glob("*.json"))}
    if directory is not None:
        if not directory.is_dir():
            raise ConfigError(f"--shapes {directory} is not a directory.")
        found |= {path.stem: path for path in sorted(directory.glob("*.json")) if path.name != "config.json"}
        found |= {path.parent.name: path for path in sorted(directory.glob("*/config.json"))}
    return found


def make_model(text: str, loaded: LoadedConfig, shapes: Mapping[str, Path]) -> GpuModel:
    """`text` is a shape's name or path with suffixes. The user's settings apply to every model."""
    name, *suffixes = text.split("+")
    path = shape_path(name, shapes)
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    chosen = _given(loaded)
    chosen.update(_suffix_settings(text, suffixes))
    chosen["model.source"] = f"random:{path}"
    chosen.setdefault("plan.max_running", MAX_RUNNING)
    chosen.setdefault("model.max_context", min(MAX_CONTEXT, _own_context(path)))
    chosen.setdefault("observe.log_level", "warning")
    for suffix, (key, value) in SUFFIXES.items():
        if chosen.get(key) == value:
            label += f"+{suffix}"
    return GpuModel(label, load_config(None, chosen).config)


def shape_path(name: str, shapes: Mapping[str, Path]) -> Path:
    if name in shapes:
        return shapes[name]
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path.resolve()
    listed = ", ".join(shapes)
    raise ConfigError(
        f"Unknown model shape '{name}'. Use one of {listed}, the path of a config.json, or --shapes DIR.",
        param="models",
    )


def _given(loaded: LoadedConfig) -> dict[str, object]:
    """Only the settings that the user gave."""
    config = loaded.config
    given = {key: origin for key, origin in loaded.sources.items() if origin != "default"}
    if "model.source" in given:
        raise ConfigError("bench gpu runs shapes with random weights: use --models, not --model.")
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in given}


def _suffix_settings(text: str, suffixes: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for suffix in suffixes:
        if suffix not in SUFFIXES:
            raise ConfigError(
                f"Unknown suffix '+{suffix}' in '{text}'. Suffixes: {', '.join('+' + s for s in SUFFIXES)}."
            )
        key, value = SUFFIXES[suffix]
        found[key] = value
    return found


def _own_context(path: Path) -> int:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return int(tree["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a model's config.json: it cannot be read or has no max_position_embeddings."
        ) from error
