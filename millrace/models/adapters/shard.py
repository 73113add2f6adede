"""The part of an adapter that one rank has: B of linears whose outputs are split over the ranks, and A of those whose
inputs are. The other matrix of each is whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.models.adapters.read import Adapter
from millrace.models.adapters.targets import targets_of
from millrace.models.spec.shard import Cut, Shard
from millrace.ops.lora.weights import LinearLora, LoraPart, join, pack


class AdapterShard:
    def __init__(self, shard: Shard) -> None:
        self._targets, cuts = targets_of(shard.whole), shard.cuts()
        self._cuts: list[list[Cut]] = [
            [] if linear is None else [cuts.get(f"{name}.weight", Cut()) for name in linear.modules]
            for linear in self._targets.linears
        ]
        """By linear and part."""

    def part_of(self, adapter: Adapter) -> Adapter:
        data, linears = join({index: self._cut(index, lora) for index, lora in adapter.linears.items()})
        return Adapter(data, linears, adapter.max_rank, adapter.digest, adapter.base_model, adapter.folder)

    def _cut(self, index: int, lora: LinearLora) -> LinearLora:
        linear = self._targets.linears[index]
        assert linear is not None
        own = iter(lora.parts(linear.in_features, linear.out_sizes))
        cuts = zip(lora.ranks, self._cuts[index], strict=False)
        return pack([_cut_part(next(own), cut) if rank else None for rank, cut in cuts])


def _cut_part(part: tuple[int, int, torch.Tensor, torch.Tensor, float], cut: Cut) -> LoraPart:
    _, _, a, b, scale = part
    if cut.columns is not None:
        a = a[:, cut.columns.start : cut.columns.stop]
    if cut.rows is not None:
        b = torch.cat([b[:, rows.start : rows.stop] for rows in _rows(cut)], dim=1)
    return LoraPart(a, b, scale)


def _rows(cut: Cut) -> Sequence[range]:
    return [own.rows for own in cut.ranges() if own.rows is not None]
