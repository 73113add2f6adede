"""A better model for this machine, for users of one that is too small to be of much use."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.sources.catalogue import CatalogueEntry, entries
from millrace.sources.estimate import machine_memory, memory_of
from millrace.sources.library import catalogue_bytes, find_local
from millrace.sources.names import has_gpu

SMALL = 1.0e9
"""Models with fewer parameters get a suggestion."""
MAX_CPU_PARAMETERS = 4.5
"""In billions of active parameters: larger models answer slower than people read on most processors."""
MEMORY_SHARE = 0.6
"""Of the machine's memory: other programs need some too."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    name: str
    download_bytes: int
    """0 if it is downloaded."""


def suggest(num_parameters: int) -> Suggestion | None:
    """The largest model of the catalogue that fits and is fast enough, a downloaded one first; None for models that are
    not small, or if nothing fits."""
    memory = machine_memory()
    if not 0 < num_parameters < SMALL or not memory:
        return None
    fitting = [entry for entry in entries() if _fits(entry, memory, num_parameters)]
    local = [entry for entry in fitting if find_local(entry.name) is not None]
    best = max(local or fitting, key=lambda entry: entry.parameters, default=None)
    return Suggestion(best.name, 0 if local else catalogue_bytes(best.name)) if best is not None else None


def _fits(entry: CatalogueEntry, memory: int, num_parameters: int) -> bool:
    needed = memory_of(entry, "bf16" if has_gpu() else "q4_k_m")
    is_fast = has_gpu() or (entry.active or entry.parameters) <= MAX_CPU_PARAMETERS
    is_larger = entry.parameters * 1e9 > 2 * num_parameters
    return entry.is_supported and not entry.gated and is_fast and is_larger and needed <= MEMORY_SHARE * memory
