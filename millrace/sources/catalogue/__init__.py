"""The catalogue of models by short name, and its comparison with the hub.

`entries.py` reads `catalogue.toml`; `check.py` compares it with the hub and remembers what it found.
"""

from millrace.sources.catalogue.entries import (
    BYTES_PER_WEIGHT,
    UNSUPPORTED_FAMILIES,
    CatalogueEntry,
    entries,
    entry_of_files,
    find_entry,
)

__all__ = [
    "BYTES_PER_WEIGHT",
    "UNSUPPORTED_FAMILIES",
    "CatalogueEntry",
    "entries",
    "entry_of_files",
    "find_entry",
]
