"""The formats of a model's matrices: how many, how large, and which version of which op multiplies them here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from millrace.config import Quantization
from millrace.models.grouped import GroupedSource, expert_parts
from millrace.models.kept_weights import grouped_matrices, stored_matrices
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import TensorSpec, layout_of
from millrace.models.stored import multiplied_parts
from millrace.ops.base.version import Version
from millrace.ops.registry import choose

if TYPE_CHECKING:
    from millrace.sources.resolve import ModelFiles


@runtime_checkable
class DescribedSource(Protocol):
    """A source of weights that are stored in files."""

    def stored_label(self, name: str) -> str:
        """The tensor's format, for people."""
        ...

    def stored_bytes(self, name: str) -> int:
        """The tensor's size in its file."""
        ...


@dataclass(frozen=True, slots=True)
class FormatShare:
    """The matrices of one format that one version multiplies."""

    label: str
    version: Version
    num_matrices: int
    num_bytes: int
    """In the files."""


def weight_formats(
    files: ModelFiles, device: torch.device, dtype: torch.dtype, quantization: Quantization
) -> list[FormatShare]:
    """By size, largest first; nothing for random weights. Reads no weights."""
    from millrace.models.weights import open_weights

    source = open_weights(files)
    if not isinstance(source, DescribedSource):
        return []
    layout = layout_of(spec_from_config(files.config))
    stored = stored_matrices(source, layout, device, dtype, quantization)
    grouped = grouped_matrices(source, layout, device, dtype, stored, quantization)

    experts = set(expert_parts(layout))

    def version_of(parts: tuple[TensorSpec, ...]) -> Version:
        kept = grouped is not None and grouped.holds(parts)
        op = "fp8_linear" if quantization == "fp8" else "linear"
        if stored is not None and stored.holds(parts):
            op = "stored_linear"
        elif parts == (layout.embedding,):
            op = "embedding" if layout.head is not None else "tied_embedding"
        elif parts in experts and device.type != "cpu":
            op = "experts"
        elif kept:
            assert grouped is not None
            op = "fp8_linear" if grouped.multiplies_fp8(parts) else "grouped_linear"
        return choose(
            op,
            device,
            dtype,
            in_features=parts[0].shape[1],
            out_features=sum(part.shape[0] for part in parts),
            int8=quantization == "int8",
            keeps_size=isinstance(source, GroupedSource),
            has_blocks=grouped is not None and grouped.has_blocks(parts),
            kept=kept,
            stored=kept and op == "experts",
            inner_features=parts[0].shape[0],
        ).version

    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    versions: dict[tuple[str, str], Version] = {}
    for parts in multiplied_parts(layout):
        version = version_of(parts)
        for part in parts:
            key = source.stored_label(part.name), f"{version.op} {version.name}"
            counts[key] += 1
            sizes[key] += source.stored_bytes(part.name)
            versions[key] = version
    return [FormatShare(key[0], versions[key], counts[key], size) for key, size in sizes.most_common()]
