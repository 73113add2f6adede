"""The mixture of experts in Triton: routing, and the experts' two matrix products with all that lies between.

Which experts are chosen is known only on the device, so grids have the largest size that the number of tokens allows
and programs without work return at once. Three ways, by the number of slots (tokens × top_k):
- vector: a slot or a token per program, no grouping; weights chosen twice are read twice;
- scan: tiles of slots with one expert, each program finding its tile among all slots;
- table: the same after one kernel has listed every expert's slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
from torch import Tensor

from millrace.ops.activation import Activation
from millrace.ops.triton import moe_kernels as kernels

KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
Way = Literal["vector", "scan", "table"]


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


VECTOR = (Tile(1, 4, 2048), Tile(1, 2, 256))
VECTOR_ELEMENTS = 8192
"""Weights that a program of the vector way asks for at a time in the down product, over all its token's experts."""

GROUPED: tuple[tuple[float, Tile, Tile], ...] = (
    (2.5, Tile(16, 64, 128), Tile(16, 128, 128)),
    (5.0, Tile(16, 64, 128, swap=True), Tile(16, 128, 128)),
    (10.0, Tile(16, 64, 128, swap=True), Tile(16, 128, 128, swap=True)),
    (20.0, Tile(32, 64, 128), Tile(32, 128, 128)),
    (64.0, Tile(64, 64, 64), Tile(64, 128, 64, stages=4)),
    (float("inf"), Tile(128, 128, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=4)),
)
"""(mean slots per expert up to which it holds, gate_up, down), measured on an H200 and 128 experts of 2048 × 768:
first enough weights on their way to keep its memory busy, then tiles that fill its matrix units."""

FIXED = MoeConfig("table", Tile(64, 64, 64, stages=4), Tile(64, 128, 64, stages=4))
"""For every number of tokens, so that none of them can change another's result."""

SCAN_LIMIT = 256 * 128
"""Slots × experts above which a kernel of its own groups them faster than every program for itself."""


def config_for(tokens: int, shape: MoeShape) -> MoeConfig:
    """The fastest known configuration for a step of this many tokens."""
    slots = tokens * shape.top_k
    if tokens == 1 or slots * 2 <= shape.num_experts:
        gate_up, down = VECTOR
        depth = VECTOR_ELEMENTS // (down.columns * _power(shape.top_k))
        return fit(MoeConfig("vector", gate_up, replace(down, depth=depth)), shape)
    mean = slots / shape.num_experts
    gate_up, down = next((up, down) for limit, up, down in GROUPED if mean <= limit)
    way: Way = "scan" if slots * shape.num_experts <= SCAN_LIMIT else "table"
    return fit(MoeConfig(way, gate_up, down), shape)


def fit(config: MoeConfig, shape: MoeShape) -> MoeConfig:
    """The same with no tile wider than its matrix or too large for the GPU."""
    if config.way == "vector":
        return replace(
            config,
            gate_up=_fit_vector(config.gate_up, shape.inner, shape.hidden, 1, shape.itemsize),
            down=_fit_vector(config.down, shape.hidden, shape.inner, _power(shape.top_k), shape.itemsize),
        )
    return replace(
        config,
        gate_up=_fit_tile(config.gate_up, shape.inner, shape.hidden, 2, shape),
        down=_fit_tile(config.down, shape.hidden, shape.inner, 1, shape),
    )


def _fit_vector(tile: Tile, columns: int, depth: int, choices: int, itemsize: int) -> Tile:
    """At most 16,384 elements of weights at a time, and no more of a row than it has."""
    room = 16_384 // choices // max(1, itemsize // 2)
    width = min(tile.columns, _power(columns))
    return replace(tile, columns=width, depth=max(16, min(tile.depth, _power(depth), room // width)))


def _fit_tile(tile: Tile, columns: int, depth: int, halves: int, shape: MoeShape) -> Tile:
    """`halves`: weight rows that a column needs."""
    if shape.itemsize > 2:
        # Without matrix units a tile's products go through registers.
        tile = replace(tile, rows=min(tile.rows, 32), columns=min(tile.columns, 32), depth=32, stages=2, swap=False)
    tile = replace(
        tile, columns=min(tile.columns, max(16, _power(columns))), depth=min(tile.depth, max(16, _power(depth)))
    )
    row_bytes = (tile.rows + halves * tile.columns) * shape.itemsize
    while row_bytes * tile.depth * tile.stages > shape.gpu.shared_bytes and tile.depth > 16:
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 2 else replace(tile, depth=tile.depth // 2)
    return tile


def _power(value: int) -> int:
    return int(triton.next_power_of_2(value))


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """As the reference, with int32 ids; among equal logits the lower expert is chosen, and comes, first."""
    tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        kernels.route_kernel[(tokens,)](
            logits,
            weights,
            ids,
            logits.stride(0),
            EXPERTS=num_experts,
            EXPERT_BLOCK=_power(num_experts),
            TOP_K=top_k,
            CHOICES=_power(top_k),
            RENORMALISE=renormalise,
            num_warps=1,
        )
    return weights, ids


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the programs of a grouped product find their slots. Scanned: `counts` and `table` are not read."""

    ids: Tensor
    counts: Tensor
    table: Tensor
    scanned_slots: int
    capacity: int


def group(ids: Tensor, num_experts: int, scan: bool) -> Groups:
    slots, tokens = ids.numel(), ids.shape[0]
    if scan:
        return Groups(ids, ids, ids, max(16, _power(slots)), 0)
    counts = torch.empty((num_experts,), dtype=torch.int32, device=ids.device)
    # A token chooses an expert at most once, so no expert has more slots than there are tokens.
    table = torch.empty((num_experts, tokens), dtype=torch.int32, device=ids.device)
    block = min(4096, max(128, _power(slots)))
    kernels.group_kernel[(num_experts,)](
        ids, counts, table, slots, tokens, BLOCK=block, num_warps=8 if block >= 2048 else 4
    )
    return Groups(ids, counts, table, 0, tokens)


def most_tiles(slots: int, num_experts: int, rows: int) -> int:
    """The most tiles of up to `rows` slots of one expert that this many slots can need."""
    groups = min(slots, num_experts)
    return (slots + groups * (rows - 1)) // rows


def grouped_product(x: Tensor, w: Tensor, groups: Groups, kind: Activation | None, tile: Tile) -> Tensor:
    """[slots, N] in the order of the slots. With a kind, w is [E, 2 N, K] and the result act(gate) · up, and x has a
    row per token; without, w is [E, N, K] and x has a row per slot."""
    slots, top_k = groups.ids.numel(), groups.ids.shape[1]
    num_experts, rows, depth = w.shape
    columns = rows if kind is None else rows // 2
    out = torch.empty((slots, columns), dtype=x.dtype, device=x.device)
    grid = (most_tiles(slots, num_experts, tile.rows) * triton.cdiv(columns, tile.columns),)
    kernels.grouped_kernel[grid](
        x,
        w,
        out,
        groups.ids,
        groups.counts,
        groups.table,
        slots,
        groups.capacity,
        EXPERTS=num_experts,
        EXPERT_BLOCK=_power(num_experts),
        SLOTS_PER_ROW=1 if kind is None else top_k,
        N=columns,
        K=depth,
        GATED=kind is not None,
        KIND=0 if kind is None else KINDS[kind],
        SCANNED_SLOTS=groups.scanned_slots,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        SWAP=tile.swap,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Slots [T k, H] -> tokens [T, H], each token's k weighted and added in the order of its choices."""
    tokens, top_k = weights.shape
    hidden = outputs.shape[1]
    out = torch.empty((tokens, hidden), dtype=outputs.dtype, device=outputs.device)
    block = min(1024, _power(hidden))
    kernels.combine_kernel[(tokens, triton.cdiv(hidden, block))](
        outputs, weights, out, H=hidden, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def vector_gate_up(x: Tensor, w: Tensor, ids: Tensor, kind: Activation, tile: Tile) -> Tensor:
    """act(gate) · up, [slots, I], of tokens x [T, H]."""
    slots, inner = ids.numel(), w.shape[1] // 2
    out = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
    kernels.vector_gate_up_kernel[(slots, triton.cdiv(inner, tile.columns))](
        x,
        w,
        out,
        ids,
        TOP_K=ids.shape[1],
        N=inner,
        K=w.shape[2],
        KIND=KINDS[kind],
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
    )
    return out


def vector_down(hidden: Tensor, w: Tensor, weights: Tensor, ids: Tensor, tile: Tile) -> Tensor:
    """Weighted and added over each token's choices: slots [T k, I] -> tokens [T, H]."""
    tokens, top_k = ids.shape
    out = torch.empty((tokens, w.shape[1]), dtype=hidden.dtype, device=hidden.device)
    kernels.vector_down_kernel[(tokens, triton.cdiv(w.shape[1], tile.columns))](
        hidden,
        w,
        out,
        weights,
        ids,
        TOP_K=top_k,
        CHOICES=_power(top_k),
        N=w.shape[1],
        K=w.shape[2],
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
    )
    return out


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kind: Activation,
    config: MoeConfig | None = None,
    gpu: Gpu | None = None,
) -> Tensor:
    """x [T, H], weights float32 [T, k], ids [T, k], gate_up [E, 2 I, H], down [E, H, I] -> [T, H]"""
    tokens, top_k = ids.shape
    if tokens == 0:
        return torch.empty_like(x)
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    num_experts, hidden, inner = down.shape
    shape = MoeShape(num_experts, top_k, hidden, inner, x.element_size(), gpu or gpu_of(x.device))
    config = config_for(tokens, shape) if config is None else fit(config, shape)
    if config.way == "vector":
        activated = vector_gate_up(x, gate_up, ids, kind, config.gate_up)
        return vector_down(activated, down, weights, ids, config.down)
    groups = group(ids, num_experts, config.way == "scan")
    activated = grouped_product(x, gate_up, groups, kind, config.gate_up)
    return combine(grouped_product(activated, down, groups, None, config.down), weights)
