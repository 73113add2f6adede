"""How the matrix products of a mixture of experts are cut into programs.

Tiles come from `ops/tuning/<device>/moe.json` and shrink to what the GPU's shared memory holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from millrace.ops.base.capability import capability
from millrace.ops.tuning.load import rule_table

Way = Literal["vector", "table"]
INTERPRETER = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes. In the gated product `columns` counts results; it reads twice as many weight rows."""

    rows: int
    """Slots of one expert; unused by the vector kernels."""
    columns: int
    depth: int
    """Elements of a weight row per iteration."""
    warps: int = 4
    stages: int = 3
    swap: bool = False
    """Transposed product: weight rows, not slots, along the longer side of the matrix instruction."""
    ahead: int = 0
    """Iterations of weights that a program prefetches before anything else."""
    evict: bool = False
    """Load weights with the evict-first policy."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device, and the limits that tiles must respect; the defaults are Hopper's."""

    shared_bytes: int = 232_448
    """Shared memory available to one program."""
    device: torch.device = INTERPRETER
    """Decides which measured table applies."""


def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu(device=device)
    major, minor = capability(device)
    if major in (9, 10):
        return Gpu(device=device)
    return Gpu(166_912 if (major, minor) in ((8, 0), (8, 7)) else 101_376, device)


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
    pdl: bool = False
    """Use programmatic dependent launch."""
    joint: bool = False
    """Both products in one launch, if their tiles have the same rows; both then use `gate_up`'s warps."""
    ahead: int = 0
    """Bytes of gate_up to prefetch before the chosen experts are known: half while the router runs, half while tokens
    are routed."""


@dataclass(frozen=True, slots=True)
class MoeTable:
    """The measured tiles and limits. The data file explains each field."""

    vector: tuple[Tile, Tile]
    vector_down_weights: int
    grouped: tuple[tuple[float, Tile, Tile], ...]
    """(maximum mean number of slots per expert, gate_up tile, down tile), ascending."""
    joint_max_mean_slots: float
    ahead_bytes: int
    pdl_max_tokens: int


@functools.cache
def moe_table(device: torch.device) -> MoeTable:
    found = rule_table(device, "moe")
    vector, grouped = found["vector"], found["grouped"]
    return MoeTable(
        vector=(Tile(**vector["gate_up"]), Tile(**vector["down"])),
        vector_down_weights=vector["down_weights"],
        grouped=tuple(
            (row["max_mean_slots"] or float("inf"), Tile(**row["gate_up"]), Tile(**row["down"])) for row in grouped
        ),
        joint_max_mean_slots=found["joint_max_mean_slots"],
        ahead_bytes=found["ahead_bytes"],
        pdl_max_tokens=found["pdl_max_tokens"],
    )


FIXED = MoeConfig("table", Tile(64, 64, 64, stages=4), Tile(64, 128, 64, stages=4))
"""One configuration for every number of tokens, on any device: a token's result does not depend on the others."""


def config_for(tokens: int, shape: MoeShape) -> MoeConfig:
    """The fastest known configuration for a step of this many tokens."""
    table, slots = moe_table(shape.gpu.device), tokens * shape.top_k
    if tokens == 1 or slots * 2 < shape.num_experts:
        gate_up, down = table.vector
        depth = table.vector_down_weights // (down.columns * power_of_two(shape.top_k))
        return fit(MoeConfig("vector", gate_up, replace(down, depth=depth)), shape)
    mean = slots / shape.num_experts
    gate_up, down = next((up, down) for limit, up, down in table.grouped if mean <= limit)
    joint = mean <= table.joint_max_mean_slots
    ahead = table.ahead_bytes if joint else 0
    return fit(MoeConfig("table", gate_up, down, pdl=tokens <= table.pdl_max_tokens, joint=joint, ahead=ahead), shape)


def fit(config: MoeConfig, shape: MoeShape) -> MoeConfig:
    """The configuration with tiles no wider than their matrix and small enough for the GPU."""
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
    """At most 16,384 weights per iteration, and no more of a row than it has."""
    max_weights = 16_384 // choices // max(1, itemsize // 2)
    width = min(tile.columns, power_of_two(columns))
    return replace(tile, columns=width, depth=max(16, min(tile.depth, power_of_two(depth), max_weights // width)))


def _fit_tile(tile: Tile, columns: int, depth: int, halves: int, shape: MoeShape) -> Tile:
    """`halves`: weight rows per column."""
    if shape.itemsize > 2:
        # float32 products do not use the matrix units: the tile must fit in registers.
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
