"""KV groups: which layers share a block table, and where each layer's keys and values are in a block.

All groups have the same number of places for layers, `page_layers`, so a block has the same size in every group and one
pool of blocks serves them all. A block of a group holds the keys and values of block_size tokens in its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 16
MAX_WASTE = 0.1
"""Places without a layer, as a share of the layers with the same window."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    windows: tuple[int | None, ...]
    """The window of each group, for which blocks are freed; None: every block is kept. Groups without one come
    first."""
    page_layers: int
    """Places for layers in a block, and KV tensors of the pool."""
    places: tuple[tuple[int, int], ...]
    """(group, index of the KV tensor) of each layer with keys and values."""

    @property
    def num_groups(self) -> int:
        return len(self.windows)


def one_group(num_layers: int) -> LayerGroups:
    """All layers in one group that keeps every block."""
    return LayerGroups((None,), num_layers, tuple((0, layer) for layer in range(num_layers)))


def group_by_window(windows: Sequence[int | None]) -> LayerGroups:
    """Group layers, given by their windows, so that all layers of a group have the same one."""
    in_order = sorted(set(windows), key=lambda window: -1 if window is None else window)
    layers = {window: [layer for layer, own in enumerate(windows) if own == window] for window in in_order}
    page_layers = _page_layers([len(own) for own in layers.values()])
    groups: list[int | None] = []
    places = {}
    for window, own in layers.items():
        for index, layer in enumerate(own):
            places[layer] = (len(groups) + index // page_layers, index % page_layers)
        groups += [window] * -(-len(own) // page_layers)
    return LayerGroups(tuple(groups), page_layers, tuple(places[layer] for layer in range(len(windows))))


def _page_layers(counts: list[int]) -> int:
    """The number of places that gives the fewest groups without much waste. What counts is the worst window: in long
    rows, groups without a window hold nearly all blocks. If every choice wastes too much, the least wasteful one of at
    most MAX_GROUPS groups; with more windows than that, one group per window."""

    def cost(page_layers: int) -> tuple[bool, float, int]:
        groups = [-(-count // page_layers) for count in counts]
        waste = max(own * page_layers / count - 1 for own, count in zip(groups, counts, strict=True))
        return sum(groups) > max(MAX_GROUPS, len(counts)), waste if waste > MAX_WASTE else 0.0, sum(groups)

    return min(range(1, max(counts) + 1), key=cost)
