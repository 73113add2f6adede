"""How the experts' products are cut into programs: tiles measured on an H200, in sizes that a GPU has room for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

Way = Literal["vector", "table"]


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes. In the gated product `columns` counts results: it reads twice as many weight rows."""

    rows: int
    """Slots of one expert; unused by the vector way."""
    columns: int
    depth: int
    """Elements of a weight row at a time."""
    warps: int = 4
    stages: int = 3
    swap: bool = False
    """The transposed product: weight rows, not slots, along the matrix unit's longer side."""
    ahead: int = 0
    """Depths of weights that a program asks for before anything else."""
    evict: bool = False
    """Weights are the first to leave the cache."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What tiles must respect; the defaults are Hopper's."""

    shared_bytes: int = 232_448
    """Shared memory that one program can have."""


def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu()
    major, minor = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return Gpu()
    return Gpu(166_912 if (major, minor) in ((8, 0), (8, 7)) else 101_376)


@dataclass(frozen=True, slots=True)
class MoeShape:
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    itemsize: int
    gpu: Gpu = Gpu()


@dataclass(frozen=True, slots=True)
class MoeConfig:
    way: Way
    gate_up: Tile
    down: Tile
    early: bool = False
    """Kernels start while the one before still runs."""
    joint: bool = False
    """Both products in one launch, where they have the same rows; they then share `gate_up`'s warps."""
    ahead: int = 0
    """Bytes of gate_up that are asked for before the choices are known, whoever may be chosen: half while the router
    runs, half while tokens are routed."""


VECTOR = (Tile(1, 4, 2048), Tile(1, 2, 256, warps=8))
VECTOR_ELEMENTS = 4096
"""Weights that a program of the vector way asks for at a time in the down product, over all its token's experts."""

GROUPED: tuple[tuple[float, Tile, Tile], ...] = (
    (10.0, Tile(16, 64, 128, swap=True), Tile(16, 128, 128, swap=True)),
    (20.0, Tile(32, 128, 128, warps=8, swap=True), Tile(32, 128, 64, swap=True)),
    (64.0, Tile(64, 64, 64), Tile(64, 128, 64, stages=4)),
    (float("inf"), Tile(128, 128, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=4)),
)
"""(mean slots per expert up to which it holds, gate_up, down), measured on an H200 and 128 experts of 2048 × 768:
first enough weights on their way to keep its memory busy, then tiles that fill its matrix units."""

JOINT_SLOTS = 10.0
"""Mean slots per expert up to which both products are one launch: 4 of 250 us a layer at 8 to 128 tokens, none at
256."""
AHEAD_BYTES = 16 << 20
"""Of gate_up, asked for before the choices are known: 0.6 of 147 us a layer at 8 tokens, 1.8 of 280 at 32, 2.3 of 355
at 128. Half as many gain a little less; a quarter more do, too, since the router then has to wait for its turn."""

EARLY_TOKENS = 512
"""Up to here kernels start early; with more they have nothing to gain."""

FIXED = MoeConfig("table", Tile(64, 64, 64, stages=4), Tile(64, 128, 64, stages=4))
"""For every number of tokens, so that none of them can change another's result."""


def config_for(tokens: int, shape: MoeShape) -> MoeConfig:
    """The fastest known configuration for a step of this many tokens."""
    slots = tokens * shape.top_k
    if tokens == 1 or slots * 2 < shape.num_experts:
        gate_up, down = VECTOR
        depth = VECTOR_ELEMENTS // (down.columns * power_of_two(shape.top_k))
        return fit(MoeConfig("vector", gate_up, replace(down, depth=depth)), shape)
    mean = slots / shape.num_experts
    gate_up, down = next((up, down) for limit, up, down in GROUPED if mean <= limit)
    joint = mean <= JOINT_SLOTS
    ahead = AHEAD_BYTES if joint else 0
    return fit(MoeConfig("table", gate_up, down, early=tokens <= EARLY_TOKENS, joint=joint, ahead=ahead), shape)


def fit(config: MoeConfig, shape: MoeShape) -> MoeConfig:
    """The same with no tile wider than its matrix or too large for the GPU."""
    if config.way == "vector":
        return replace(
            config,
            gate_up=_fit_vector(config.gate_up, shape.inner, shape.hidden, 1, shape.itemsize),
            down=_fit_vector(config.down, shape.hidden, shape.inner, power_of_two(shape.top_k), shape.itemsize),
        )
    return replace(
        config,
        gate_up=_fit_tile(config.gate_up, shape.inner, shape.hidden, 2, shape),
        down=_fit_tile(config.down, shape.hidden, shape.inner, 1, shape),
    )


def _fit_vector(tile: Tile, columns: int, depth: int, choices: int, itemsize: int) -> Tile:
    """At most 16,384 elements of weights at a time, and no more of a row than it has."""
    room = 16_384 // choices // max(1, itemsize // 2)
    width = min(tile.columns, power_of_two(columns))
    return replace(tile, columns=width, depth=max(16, min(tile.depth, power_of_two(depth), room // width)))


def _fit_tile(tile: Tile, columns: int, depth: int, halves: int, shape: MoeShape) -> Tile:
    """`halves`: weight rows that a column needs."""
    if shape.itemsize > 2:
        # Without matrix units a tile's products go through registers.
        tile = replace(tile, rows=min(tile.rows, 32), columns=min(tile.columns, 32), depth=32, stages=2, swap=False)
    tile = replace(
        tile,
        columns=min(tile.columns, max(16, power_of_two(columns))),
        depth=min(tile.depth, max(16, power_of_two(depth))),
    )
    row_bytes = (tile.rows + halves * tile.columns) * shape.itemsize
    while row_bytes * tile.depth * tile.stages > shape.gpu.shared_bytes and tile.depth > 16:
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 2 else replace(tile, depth=tile.depth // 2)
    return tile


def power_of_two(value: int) -> int:
    return int(triton.next_power_of_2(value))
