"""The linears of a model that adapters can change, by the names that checkpoints and adapters use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.models.spec.layout import Matrix
    from millrace.models.spec.model_spec import ModelSpec

QKV, OUT, GATE_UP, DOWN = range(4)
NUM_KINDS = 4
"""Linears of a layer."""


@dataclass(frozen=True, slots=True)
class TargetLinear:
    """A linear as the decoder multiplies it, of one or several modules of the checkpoint."""

    modules: tuple[str, ...]
    """Names without `.weight`; their outputs follow one another."""
    in_features: int
    out_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterTargets:
    linears: tuple[TargetLinear | None, ...]
    """By `layer * NUM_KINDS + kind`; None where a layer has experts, or nothing of this kind."""

    def places(self) -> dict[str, tuple[int, int]]:
        """Module name -> (linear, part)."""
        found = enumerate(self.linears)
        return {
            name: (index, part)
            for index, linear in found
            if linear is not None
            for part, name in enumerate(linear.modules)
        }


def targets_of(spec: ModelSpec) -> AdapterTargets:
    from millrace.models.spec.layout import AttentionLayout, MoeLayout, layout_of  # local: imports torch

    linears: list[TargetLinear | None] = []
    for layer in layout_of(spec).layers:
        mlp = (None, None) if layer.mlp is None or isinstance(layer.mlp, MoeLayout) else layer.mlp
        mixer = (layer.mixer.qkv, layer.mixer.out) if isinstance(layer.mixer, AttentionLayout) else (None, None)
        linears += [None if matrix is None else _target(matrix) for matrix in (*mixer, *mlp)]
    return AdapterTargets(tuple(linears))


def _target(matrix: Matrix) -> TargetLinear:
    names = tuple(part.name.removesuffix(".weight") for part in matrix.parts)
    return TargetLinear(names, matrix.shape[1], tuple(part.shape[0] for part in matrix.parts))
