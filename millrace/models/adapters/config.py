"""`adapter_config.json` of a PEFT adapter: what it says, and what of it is not supported."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import AdapterError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 256
"""The kernels' limit."""
_REFUSED_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("use_dora", False, "DoRA, which scales whole weight matrices (use_dora)"),
    ("lora_bias", False, "a bias beside the low-rank matrices (lora_bias)"),
    ("use_qalora", False, "QALoRA (use_qalora)"),
    ("use_bdlora", None, "block-diagonal matrices (use_bdlora)"),
    ("fan_in_fan_out", False, "weights stored as [in, out] (fan_in_fan_out)"),
    ("trainable_token_indices", None, "trained token embeddings (trainable_token_indices)"),
    ("target_parameters", None, "parameters instead of modules (target_parameters)"),
    ("alora_invocation_tokens", None, "activated LoRA (alora_invocation_tokens)"),
    ("layer_replication", None, "replicated layers (layer_replication)"),
    ("arrow_config", None, "Arrow routing (arrow_config)"),
    ("lora_ga_config", None, "LoRA-GA (lora_ga_config)"),
)
"""(field, the value that means it is off, what it is)."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of the values of `init_lora_weights` that change the base's weights too, when it is trained and loaded."""
MERGE = "merge it into its model with PEFT's merge_and_unload"
_MERGE_DORA = "merge it into its model with `millrace merge`"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    folder: Path
    base_model: str
    """`base_model_name_or_path`; empty if unknown."""
    rank: int
    alpha: float
    uses_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    uses_dora: bool = False

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / rank, or with rsLoRA alpha / sqrt(rank), of this module's own alpha and rank."""
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def read_config(folder: Path, *, allows_dora: bool = False) -> AdapterConfig:
    """Raises AdapterError with the field that is missing or not supported."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise AdapterError(f"{folder}: there is no such directory. An adapter is a directory that PEFT has saved.")
    if not path.is_file():
        inner = sorted(one.parent.name for one in folder.glob(f"*/{CONFIG_FILE}"))
        found = f" Name one of the adapters in it: {', '.join(inner[:5])}." if inner else ""
        raise AdapterError(f"{folder}: no {CONFIG_FILE}. An adapter is a directory that PEFT has saved.{found}")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path} has {path.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are read.")
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{path} holds no JSON object.")
    _check_supported(path, values, allows_dora)
    _check_weights_file(folder)
    return AdapterConfig(
        folder=folder,
        base_model=str(values.get("base_model_name_or_path") or ""),
        rank=_rank(path, "r", values.get("r", 8)),
        alpha=_number(path, "lora_alpha", values.get("lora_alpha", 8)),
        uses_rslora=bool(values.get("use_rslora", False)),
        rank_pattern={
            name: _rank(path, "rank_pattern", value) for name, value in _pattern(path, values, "rank_pattern").items()
        },
        alpha_pattern={
            name: _number(path, "alpha_pattern", value)
            for name, value in _pattern(path, values, "alpha_pattern").items()
        },
        uses_dora=bool(values.get("use_dora", False)),
    )


def _check_supported(path: Path, values: dict[str, Any], allows_dora: bool) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {kind!r}; only LORA is supported.")
    for field, off, what in _REFUSED_VALUES:
        value = values.get(field, off)
        if field == "use_dora" and allows_dora:
            continue
        if value != off and value not in (None, False, [], {}):
            raise AdapterError(
                f"{path}: the adapter has {what}, which is not supported. Train it without {field}, or"
                f" {_MERGE_DORA if field == 'use_dora' else MERGE}."
            )
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights is {init!r}, which changes the base's weights too, so that the adapter does not"
            " fit the base as it is. Save it again with PEFT's path_initial_model_for_weight_conversion (PiSSA, OLoRA"
            f" and CorDA), or {MERGE}."
        )
    if values.get("bias", "none") != "none":
        raise AdapterError(
            f"{path}: bias is {values['bias']!r}: the adapter has its own biases, which are not supported. Train it"
            f" with bias='none', or {MERGE}."
        )
    if values.get("modules_to_save"):
        names = ", ".join(map(str, values["modules_to_save"]))
        raise AdapterError(
            f"{path}: modules_to_save has {names}: whole modules, which are not supported. Train it without them, or"
            f" {MERGE}."
        )


def _check_weights_file(folder: Path) -> None:
    if (folder / WEIGHTS_FILE).is_file():
        return
    found = next((name for name in PICKLES if (folder / name).exists()), None)
    if found is not None:
        raise AdapterError(
            f"{folder / found} is a pickle, which can run any code when it is read; it was not opened. Save the adapter"
            " again with safe_serialization=True."
        )
    parts = sorted(path.name for path in folder.glob("adapter_model*.safetensors*"))
    if parts:
        raise AdapterError(
            f"{folder}: the weights are in several files ({', '.join(parts[:3])}); one is read. Load the adapter with"
            f" PEFT and save it again, which writes {WEIGHTS_FILE}."
        )
    raise AdapterError(f"{folder}: no {WEIGHTS_FILE}, which PEFT's save_pretrained writes. Copy it there.")


def _pattern(path: Path, values: dict[str, Any], field: str) -> dict[str, Any]:
    found = values.get(field) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{path}: {field} must be an object.")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{path}: {field} has {pattern!r}, which is no regular expression: {error}") from error
    return found


def _rank(path: Path, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{path}: {field} has the rank {value!r}; ranks are integers from 1 to {MAX_RANK}.")
    return value


def _number(path: Path, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{path}: {field} is {value!r}, which is not a finite number.")
    return float(value)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """As PEFT: the first key that is the module's name, or a regular expression for its end."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
