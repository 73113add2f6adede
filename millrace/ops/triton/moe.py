"""The mixture of experts in Triton: routing, and the experts' two matrix products with all that lies between.

Which experts are chosen is known only on the device, so grids have the largest size that the number of tokens allows
and programs without work return at once. Two ways, by the number of slots (tokens × top_k):
- vector: a slot or a token per program, no grouping; weights chosen twice are read twice;
- table: tiles of slots with one expert, after every expert's slots have been listed by the kernel that routes or, where
  choices come from elsewhere, by one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
from torch import Tensor

from millrace.ops.activation import Activation
from millrace.ops.triton import early_start
from millrace.ops.triton import moe_joint_kernels as joint_kernels
from millrace.ops.triton import moe_kernels as kernels
from millrace.ops.triton import moe_route_kernels as route_kernels
from millrace.ops.unsummed import Unsummed

KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
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
    """Bytes of gate_up that are asked for while the router still runs, whoever may be chosen."""


VECTOR = (Tile(1, 4, 2048), Tile(1, 2, 256, warps=8))
VECTOR_ELEMENTS = 4096
"""Weights that a program of the vector way asks for at a time in the down product, over all its token's experts."""

GROUPED: tuple[tuple[float, Tile, Tile], ...] = (
    (0.6, Tile(16, 32, 256), Tile(16, 128, 128)),
    (5.0, Tile(16, 64, 128, swap=True), Tile(16, 128, 128, swap=True)),
    (10.0, Tile(16, 64, 128, swap=True), Tile(16, 128, 64, swap=True)),
    (20.0, Tile(32, 128, 128, warps=8, swap=True), Tile(32, 128, 64, swap=True)),
    (64.0, Tile(64, 64, 64), Tile(64, 128, 64, stages=4)),
    (float("inf"), Tile(128, 128, 64, warps=8, stages=4), Tile(128, 256, 64, warps=8, stages=4)),
)
"""(mean slots per expert up to which it holds, gate_up, down), measured on an H200 and 128 experts of 2048 × 768:
first enough weights on their way to keep its memory busy, then tiles that fill its matrix units."""

LOOKS = 1 << 17
"""A program of the down product looks so often for the end of those it needs: about a tenth of a second."""
SHARE_AHEAD = 1 << 18
"""Bytes of weights that one program asks for while the router still runs."""

EARLY_TOKENS = 512
"""Up to here kernels start early; with more they have nothing to gain."""

FIXED = MoeConfig("table", Tile(64, 64, 64, stages=4), Tile(64, 128, 64, stages=4))
"""For every number of tokens, so that none of them can change another's result."""


def config_for(tokens: int, shape: MoeShape) -> MoeConfig:
    """The fastest known configuration for a step of this many tokens."""
    slots = tokens * shape.top_k
    if tokens == 1 or slots * 2 <= shape.num_experts:
        gate_up, down = VECTOR
        depth = VECTOR_ELEMENTS // (down.columns * _power(shape.top_k))
        return fit(MoeConfig("vector", gate_up, replace(down, depth=depth)), shape)
    mean = slots / shape.num_experts
    gate_up, down = next((up, down) for limit, up, down in GROUPED if mean <= limit)
    return fit(MoeConfig("table", gate_up, down, early=tokens <= EARLY_TOKENS), shape)


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


def _early(device: torch.device, early: bool = True) -> dict[str, bool]:
    return early_start(device) if early else {"EARLY": False}


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the programs of a grouped product find their slots."""

    slots: int
    top_k: int
    counts: Tensor
    """How many slots each expert has."""
    table: Tensor
    """[E, tokens]: the slots of each expert. A token chooses an expert at most once."""


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """As the reference, with int32 ids; among equal logits the lower expert is chosen, and comes, first."""
    weights, ids, _ = _route(logits, top_k, renormalise, None)
    return weights, ids


def route_and_group(
    logits: Tensor, top_k: int, renormalise: bool, counts: Tensor, gate_up: Tensor | None = None, ahead: int = 0
) -> tuple[Tensor, Groups]:
    """The weights of all choices, and their slots by experts. `counts` [E] are zero, and whoever has no more use for
    the groups sets them back to zero. `ahead`: bytes of gate_up to ask for meanwhile."""
    weights, _, table = _route(logits, top_k, renormalise, counts, gate_up, ahead)
    return weights, Groups(weights.numel(), top_k, counts, table)


def _route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    counts: Tensor | None,
    gate_up: Tensor | None = None,
    ahead: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, ids, table); without counts the table is not filled."""
    shares = 0 if gate_up is None or not gate_up.is_cuda else min(ahead, gate_up.nbytes) // SHARE_AHEAD
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    table = ids if counts is None else torch.empty((num_experts, tokens), dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernels.route_kernel[(tokens + shares,)](
            logits,
            weights,
            ids,
            ids if counts is None else counts,
            table,
            gate_up if shares else ids,
            logits.stride(0),
            tokens,
            tokens,
            EXPERTS=num_experts,
            EXPERT_BLOCK=_power(num_experts),
            TOP_K=top_k,
            CHOICES=_power(top_k),
            RENORMALISE=renormalise,
            GROUP=counts is not None,
            AHEAD=SHARE_AHEAD if shares else 0,
            num_warps=1,
            **_early(logits.device),
        )
    return weights, ids, table


def group(ids: Tensor, num_experts: int, early: bool = False) -> Groups:
    slots, (tokens, top_k) = ids.numel(), ids.shape
    counts = torch.empty((num_experts,), dtype=torch.int32, device=ids.device)
    table = torch.empty((num_experts, tokens), dtype=torch.int32, device=ids.device)
    block = min(4096, max(128, _power(slots)))
    route_kernels.group_kernel[(num_experts,)](
        ids,
        counts,
        table,
        slots,
        tokens,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **_early(ids.device, early),
    )
    return Groups(slots, top_k, counts, table)


def most_tiles(slots: int, num_experts: int, rows: int) -> int:
    """The most tiles of up to `rows` slots of one expert that this many slots can need."""
    groups = min(slots, num_experts)
    return (slots + groups * (rows - 1)) // rows


def grouped_product(
    x: Tensor, w: Tensor, groups: Groups, kind: Activation | None, tile: Tile, early: bool = False
) -> Tensor:
    """[slots, N] in the order of the slots. With a kind, w is [E, 2 N, K] and the result act(gate) · up, and x has a
    row per token; without, w is [E, N, K] and x has a row per slot."""
    num_experts, rows, depth = w.shape
    columns = rows if kind is None else rows // 2
    out = torch.empty((groups.slots, columns), dtype=x.dtype, device=x.device)
    count = most_tiles(groups.slots, num_experts, tile.rows)
    kernels.grouped_kernel[(count * triton.cdiv(columns, tile.columns),)](
        x,
        w,
        out,
        groups.counts,
        groups.table,
        groups.slots,
        groups.table.shape[1],
        EXPERTS=num_experts,
        EXPERT_BLOCK=_power(num_experts),
        SLOTS_PER_ROW=1 if kind is None else groups.top_k,
        N=columns,
        K=depth,
        GATED=kind is not None,
        KIND=0 if kind is None else KINDS[kind],
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        SWAP=tile.swap,
        EVICT="evict_first" if tile.evict else "",
        AHEAD=_bytes_ahead(tile, depth, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_early(x.device, early),
    )
    return out


def joint_products(
    x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, finished: Tensor, kind: Activation, config: MoeConfig
) -> Tensor:
    """[slots, H] in the order of the slots; both products in one launch. `finished` [E] are zero, and whoever knows
    that the launch has ended sets them back to zero."""
    num_experts, hidden, inner = down.shape
    up, low = config.gate_up, config.down
    activated = torch.empty((groups.slots, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((groups.slots, hidden), dtype=x.dtype, device=x.device)
    tiles = most_tiles(groups.slots, num_experts, up.rows)
    joint_kernels.joint_kernel[(tiles * (triton.cdiv(inner, up.columns) + triton.cdiv(hidden, low.columns)),)](
        x,
        gate_up,
        down,
        activated,
        out,
        groups.counts,
        finished,
        groups.table,
        groups.slots,
        groups.table.shape[1],
        EXPERTS=num_experts,
        EXPERT_BLOCK=_power(num_experts),
        TOP_K=groups.top_k,
        INNER=inner,
        HIDDEN=hidden,
        KIND=KINDS[kind],
        BLOCK_M=up.rows,
        UP_N=up.columns,
        UP_K=up.depth,
        DOWN_N=low.columns,
        DOWN_K=low.depth,
        UP_SWAP=up.swap,
        DOWN_SWAP=low.swap,
        AHEAD=_bytes_ahead(low, inner, x),
        TRIES=LOOKS,
        num_warps=up.warps,
        num_stages=min(up.stages, low.stages),
        **_early(x.device, config.early),
    )
    return out


def _bytes_ahead(tile: Tile, depth: int, x: Tensor) -> int:
    """Of each weight row; none where rows do not start at whole 16 bytes or there is no GPU to ask."""
    row = depth * x.element_size()
    return 0 if row % 16 or x.device.type != "cuda" else min(tile.ahead * tile.depth * x.element_size(), row)


def combine(outputs: Tensor, weights: Tensor, early: bool = False, counts: Tensor | None = None) -> Tensor:
    """Slots [T k, H] -> tokens [T, H], each token's k weighted and added in the order of its choices; `counts` are set
    to zero."""
    tokens, top_k = weights.shape
    hidden = outputs.shape[1]
    out = torch.empty((tokens, hidden), dtype=outputs.dtype, device=outputs.device)
    block = min(1024, _power(hidden))
    kernels.combine_kernel[(tokens, triton.cdiv(hidden, block))](
        outputs,
        weights,
        out,
        out if counts is None else counts,
        H=hidden,
        TOP_K=top_k,
        BLOCK=block,
        EXPERTS=0 if counts is None else counts.numel(),
        EXPERT_BLOCK=1 if counts is None else _power(counts.numel()),
        num_warps=4,
        **_early(out.device, early),
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
    shape = _shape_of(x, down, top_k, gpu)
    config = config_for(tokens, shape) if config is None else fit(config, shape)
    if config.way == "vector":
        activated = vector_gate_up(x, gate_up, ids, kind, config.gate_up)
        return vector_down(activated, down, weights, ids, config.down)
    groups = group(ids, down.shape[0], config.early)
    return combine(_grouped(x, groups, gate_up, down, kind, config), weights, config.early)


def _shape_of(x: Tensor, down: Tensor, top_k: int, gpu: Gpu | None) -> MoeShape:
    num_experts, hidden, inner = down.shape
    return MoeShape(num_experts, top_k, hidden, inner, x.element_size(), gpu or gpu_of(x.device))


def _grouped(x: Tensor, groups: Groups, gate_up: Tensor, down: Tensor, kind: Activation, config: MoeConfig) -> Tensor:
    """[slots, H]"""
    activated = grouped_product(x, gate_up, groups, kind, config.gate_up, config.early)
    return grouped_product(activated, down, groups, None, config.down, config.early)


def routed_experts(
    x: Tensor,
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    gate_up: Tensor,
    down: Tensor,
    kind: Activation,
    counters: Tensor,
    config: MoeConfig | None = None,
    gpu: Gpu | None = None,
) -> Tensor | Unsummed:
    """`experts` of what `route` chooses, where there are groups not yet summed. `counters` [2, E] are zero between
    calls, whose results have been summed; calls that may run at once need their own."""
    tokens = logits.shape[0]
    if tokens == 0:
        return torch.empty_like(x)
    config = config or config_for(tokens, _shape_of(x, down, top_k, gpu))
    if config.way == "vector":
        weights, ids = route(logits, top_k, renormalise)
        return experts(x, weights, ids, gate_up, down, kind, config, gpu)
    counts, finished = counters
    weights, groups = route_and_group(logits, top_k, renormalise, counts, gate_up, config.ahead)
    x = x.contiguous()
    if config.joint and config.gate_up.rows == config.down.rows:
        outputs = joint_products(x, gate_up, down, groups, finished, kind, config)
    else:
        outputs = _grouped(x, groups, gate_up, down, kind, config)
    return Unsummed(outputs, weights, counters)


def summed(parts: Tensor | Unsummed, early: bool = True) -> Tensor:
    """[T, H], by a kernel of its own where a sum is left to do."""
    return parts if isinstance(parts, Tensor) else combine(parts.outputs, parts.weights, early, parts.counters)
