"""Reads the measured tables and decides which of them a device gets, by its compute capability.

A product table maps (outputs, inputs) of a weight to {rows: entry}. An entry serves every number of rows up to its own
that has no smaller entry.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Entry = tuple[Any, ...] | None
"""The leading fields of what a product takes; None: another kernel is faster, the file says which."""
EntriesByRows = Mapping[int, Entry]
ProductTable = Mapping[tuple[int, int], EntriesByRows]

MEASURED: Mapping[tuple[int, int], str] = {(9, 0): "h200"}
"""Compute capability -> folder of the tables that were measured on it."""
FALLBACK = "h200"
"""Tables of rules that every device needs, where nothing was measured on it; and of Triton's interpreter."""
H200_MULTIPROCESSORS = 132
ANY_ROWS = 1 << 30
"""Stands for the key "any": no upper limit."""


def measured_on(device: torch.device) -> str | None:
    """The folder of the tables for this device, or None if nothing was measured on its kind."""
    return MEASURED.get(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def product_table(device: torch.device, name: str, section: str) -> ProductTable:
    """One section of a file of product tables; empty where nothing was measured on this kind of device."""
    folder = measured_on(device)
    return {} if folder is None else read_product_table(folder, name, section)


def rule_table(device: torch.device, name: str) -> dict[str, Any]:
    """The numbers of a rule that every device needs: its own, or those of FALLBACK."""
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
    """Of this device; Triton's interpreter counts as an H200."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
