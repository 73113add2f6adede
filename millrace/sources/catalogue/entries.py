"""Popular models by short name (`catalogue.toml`): their hub ids, sizes, and recommended sampling."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("catalogue.toml")
BYTES_PER_WEIGHT = {"bf16": 2.0, "f16": 2.0, "fp8": 1.05, "q8_0": 1.07, "q6_k": 0.83, "q5_k_m": 0.72, "q4_k_m": 0.61}
"""Bytes per parameter of a format, with scales and the parts that stay at higher precision."""
UNSUPPORTED_FAMILIES: frozenset[str] = frozenset()
"""Families of the catalogue that `models` cannot load yet; a test compares. They are refused before a download."""
_FORMAT_SUFFIX = re.compile(r"[-._](?:i?q\d\w*|bf16|f16|f32|fp8|awq|gptq|int[48]|gguf)$")
_VARIANT_SUFFIX = re.compile(r"[-._](?:instruct|chat|it)$")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    hub: str
    """Repository with safetensors."""
    gguf: str
    """Repository with quantised GGUF files."""
    family: str
    """`model_type` of its config.json."""
    parameters: float
    """In billions, like `active`."""
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    aliases: tuple[str, ...] = ()
    quantised: Mapping[str, str] = field(default_factory=dict)
    """Repositories of quantised checkpoints by format: fp8, awq, gptq."""
    active: float = 0.0
    """Parameters that one token uses, in a mixture of experts; 0 = all."""
    gated: bool = False
    """The hub wants a login and an accepted licence."""
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_supported(self) -> bool:
        return self.family not in UNSUPPORTED_FAMILIES

    def num_bytes(self, weight_format: str) -> int:
        """Approximate size of the weights."""
        return int(self.parameters * 1e9 * BYTES_PER_WEIGHT[weight_format])

    @property
    def kv_bytes_per_token(self) -> int:
        """At two bytes per number, all layers counted."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))["model"]
    return tuple(CatalogueEntry(**{**table, "aliases": tuple(table["aliases"])}) for table in tables)


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry with this name, alias or hub id, ignoring case."""
    wanted = name.strip().lower()
    for entry in entries():
        if wanted in (entry.name, *entry.aliases, entry.hub.lower(), entry.gguf.lower()):
            return entry
    return None


def entry_of_files(name: str) -> CatalogueEntry | None:
    """The entry of a model that was loaded from files: `Qwen3-8B-Q4_K_M`, `org/Qwen3-8B-GGUF:…`, `qwen3-8b`."""
    base = name.partition(":")[0].rpartition("/")[2].lower()
    shortened = _FORMAT_SUFFIX.sub("", _FORMAT_SUFFIX.sub("", base))
    candidates = {base, shortened}
    for entry in entries():
        repositories = (entry.hub, *entry.quantised.values())
        names = {entry.name, *entry.aliases, *(repo.rpartition("/")[2].lower() for repo in repositories)}
        if candidates & names or _VARIANT_SUFFIX.sub("", shortened) in (entry.name,):
            return entry
    return None
