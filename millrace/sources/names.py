"""Names of models on the hub: `org/model[@revision][:quantisation or file]`, short names, and the user's aliases."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass

from millrace.config import settings_dir
from millrace.errors import ModelError
from millrace.sources.catalogue import CatalogueEntry, find_entry
from millrace.sources.known_models import find_known

_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<variant>[\w./-]+))?"
)
_ALIAS = re.compile(r"[A-Za-z0-9][\w.:-]*")
DEFAULT_QUANTISATION = "Q4_K_M"
CHECKPOINT_FORMATS = ("fp8", "awq", "gptq")
"""Quantisations that are safetensors checkpoints, not GGUF files."""
_ALIASES_FILE = "aliases.toml"


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    revision: str = "main"
    variant: str = ""
    """Empty: safetensors; a GGUF file name, or a quantisation such as Q4_K_M."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.variant}" if self.variant else "")


def parse_name(text: str, *, has_gpu: bool) -> HubName | None:
    """The hub name that `text` means: written out, or a name of the catalogue. None if it is neither.

    A short name without a quantisation means safetensors on a machine with a GPU, else a 4-bit GGUF file.
    """
    entry, variant = find_entry(text), ""
    if entry is None and "/" not in text and ":" in text:
        base, _, variant = text.rpartition(":")
        entry = find_entry(base)
    if entry is not None and "/" not in text:
        if variant.lower() in CHECKPOINT_FORMATS:
            return HubName(_checkpoint_of(entry, variant.lower()))
        variant = variant or ("" if has_gpu else DEFAULT_QUANTISATION)
        return HubName(entry.gguf if variant else entry.hub, "main", variant)
    match = _HUB_NAME.fullmatch(text)
    if match is None or text.startswith(("./", "../", "~")):
        return None
    return HubName(match["repo"], match["revision"] or "main", match["variant"] or "")


def _checkpoint_of(entry: CatalogueEntry, variant: str) -> str:
    if variant not in entry.quantised:
        known = ", ".join(f"{entry.name}:{name}" for name in (*entry.quantised, DEFAULT_QUANTISATION.lower()))
        raise ModelError(f"The catalogue has no {variant} checkpoint of {entry.name}. Use {known}, or a hub name.")
    return entry.quantised[variant]


def has_gpu() -> bool:
    """True if an NVIDIA driver is loaded. Needs no torch."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def expand_alias(text: str) -> str:
    """The model that an alias stands for; `text` itself if it is no alias."""
    return read_aliases().get(text, text)


def read_aliases() -> dict[str, str]:
    path = settings_dir() / _ALIASES_FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelError(f"The aliases in {path} cannot be read: {error}. Correct or delete the file.") from error
    return {name: target for name, target in table.items() if isinstance(target, str)}


def write_alias(name: str, target: str) -> None:
    """Set an alias; an empty target removes it."""
    import tomli_w

    if not _ALIAS.fullmatch(name):
        raise ModelError(f"'{name}' cannot be an alias; use letters, digits, dots, dashes and colons.")
    if find_known(name) is not None or find_entry(name) is not None:
        raise ModelError(f"'{name}' is the name of a known model; choose another alias.")
    aliases = read_aliases()
    if not target and name not in aliases:
        raise ModelError(f"There is no alias '{name}'. `millrace alias` lists them.")
    aliases[name] = target
    path = settings_dir() / _ALIASES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(tomli_w.dumps({key: value for key, value in aliases.items() if value}), encoding="utf-8")
    os.replace(partial, path)
