"""Reads the measured tables and decides which of them a device gets, by its compute capability.

A product table maps (outputs, inputs) of a weight to {rows: entry}. An entry applies to row counts up to its key and
above the next smaller key.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from millrace.ops.base.capability import capability

Entry = tuple[Any, ...] | None
"""First fields of the kernel's configuration, such as `Tiles`; None if another kernel, named in the file, is faster."""
EntriesByRows = Mapping[int, Entry]
ProductTable = Mapping[tuple[int, int], EntriesByRows]

MEASURED: Mapping[tuple[int, int], str] = {(9, 0): "h200"}
"""Compute capability -> folder with the tables measured on it."""
FALLBACK = "h200"
"""Rule tables for devices without measurements and for Triton's interpreter."""
H200_MULTIPROCESSORS = 132
ANY_ROWS = 1 << 30
"""Stands for the key "any": no upper limit."""


def measured_on(device: torch.device) -> str | None:
    """Folder of the tables for this kind of device, or None if it was not measured."""
    return MEASURED.get(capability(device)) if device.type == "cuda" else None


def product_table(device: torch.device, name: str, section: str) -> ProductTable:
    """One section of a file of product tables; empty if this kind of device was not measured."""
    folder = measured_on(device)
    return {} if folder is None else read_product_table(folder, name, section)


def rule_table(device: torch.device, name: str) -> dict[str, Any]:
    """A table that every device needs: its own if it was measured, else that of FALLBACK."""
    return read(measured_on(device) or FALLBACK, name)


@functools.cache
def read(folder: str, name: str) -> dict[str, Any]:
    """A whole file, provenance included."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


@functools.cache
def read_product_table(folder: str, name: str, section: str) -> ProductTable:
    sizes = read(folder, name)[section].items()
    return {(int(size.split("x")[0]), int(size.split("x")[1])): entries_by_rows(entries) for size, entries in sizes}


def entries_by_rows(entries: Mapping[str, list[Any] | None]) -> EntriesByRows:
    return {
        ANY_ROWS if rows == "any" else int(rows): None if entry is None else tuple(entry)
        for rows, entry in entries.items()
    }


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of this device; Triton's interpreter counts as an H200."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
