"""Mixture of experts: launches the kernels for routing, the experts' two matrix products and the activation between.

The chosen experts are known only on the device, so grids have the largest size that the number of tokens allows, and
programs without work return at once. Two methods, by the number of slots (tokens × top_k):
- vector: one slot or token per program, no grouping; the weights of an expert chosen twice are read twice;
- table: tiles of slots that chose one expert. The routing kernel lists each expert's slots in a table; if the caller
  has already routed, a separate kernel builds the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from millrace.ops.base.activation_kind import Activation
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.triton.dependent_launch import pdl_options
from millrace.ops.triton.moe import joint_kernels, kernels, route_kernels
from millrace.ops.triton.moe.config import Gpu, MoeConfig, MoeShape, Tile, config_for, fit, gpu_of, power_of_two

KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
MAX_POLLS = 1 << 22
"""Maximum polls of a down-product program for the gated product it depends on; takes some seconds."""
SHARE_AHEAD = 1 << 18
"""Bytes of weights that one program prefetches before the choices are known."""


def launch_options(device: torch.device, pdl: bool = True) -> dict[str, bool]:
    return pdl_options(device) if pdl else {"EARLY": False}


@dataclass(frozen=True, slots=True)
class Groups:
    """The slots of each expert, for the programs of a grouped product."""

    slots: int
    top_k: int
    counts: Tensor
    """[E]: number of slots per expert."""
    table: Tensor
    """[E, tokens]: slots of each expert. A token chooses an expert at most once."""


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """As the reference, with int32 ids; among equal logits the lower expert comes first."""
    weights, ids, _ = _route(logits, top_k, renormalise, None)
    return weights, ids


def route_and_group(
    logits: Tensor, top_k: int, renormalise: bool, counts: Tensor, gate_up: Tensor | None = None, ahead: int = 0
) -> tuple[Tensor, Groups]:
    """The weights of all choices, and their slots grouped by expert. `counts` [E] must be zero; the last user of the
    groups resets them. `ahead`: bytes of gate_up to prefetch meanwhile and while the router runs."""
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
    # The prefetch instruction exists on the same GPUs as programmatic dependent launch.
    asks = gate_up is not None and launch_options(logits.device)["EARLY"]
    shares = min(ahead, gate_up.nbytes) // SHARE_AHEAD if gate_up is not None and asks else 0
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
            shares // 2,
            EXPERTS=num_experts,
            EXPERT_BLOCK=power_of_two(num_experts),
            TOP_K=top_k,
            CHOICES=power_of_two(top_k),
            RENORMALISE=renormalise,
            GROUP=counts is not None,
            AHEAD=SHARE_AHEAD if shares else 0,
            num_warps=1,
            **launch_options(logits.device),
        )
    return weights, ids, table


def group(ids: Tensor, num_experts: int, pdl: bool = False) -> Groups:
    slots, (tokens, top_k) = ids.numel(), ids.shape
    counts = torch.empty((num_experts,), dtype=torch.int32, device=ids.device)
    table = torch.empty((num_experts, tokens), dtype=torch.int32, device=ids.device)
    block = min(4096, max(128, power_of_two(slots)))
    route_kernels.group_kernel[(num_experts,)](
        ids,
        counts,
        table,
        slots,
        tokens,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **launch_options(ids.device, pdl),
    )
    return Groups(slots, top_k, counts, table)


def max_tiles(slots: int, num_experts: int, rows: int) -> int:
    """Upper bound on the tiles of up to `rows` slots of one expert that this many slots need."""
    groups = min(slots, num_experts)
    return (slots + groups * (rows - 1)) // rows


def grouped_product(
    x: Tensor, w: Tensor, groups: Groups, kind: Activation | None, tile: Tile, pdl: bool = False
) -> Tensor:
    """[slots, N] in slot order. With a kind, w is [E, 2 N, K], the result is act(gate) · up and x has a row per token;
    without, w is [E, N, K] and x has a row per slot."""
    num_experts, rows, depth = w.shape
    columns = rows if kind is None else rows // 2
    out = torch.empty((groups.slots, columns), dtype=x.dtype, device=x.device)
    count = max_tiles(groups.slots, num_experts, tile.rows)
    kernels.grouped_kernel[(count * triton.cdiv(columns, tile.columns),)](
        x,
        w,
        out,
        groups.counts,
        groups.table,
        groups.slots,
        groups.table.shape[1],
        EXPERTS=num_experts,
        EXPERT_BLOCK=power_of_two(num_experts),
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
        **launch_options(x.device, pdl),
    )
    return out


def joint_products(
    x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, finished: Tensor, kind: Activation, config: MoeConfig
) -> Tensor:
    """[slots, H] in slot order; both products in one launch. `finished` [E] must be zero; a later kernel resets it."""
    num_experts, hidden, inner = down.shape
    up, low = config.gate_up, config.down
    activated = torch.empty((groups.slots, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((groups.slots, hidden), dtype=x.dtype, device=x.device)
    tiles = max_tiles(groups.slots, num_experts, up.rows)
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
        EXPERT_BLOCK=power_of_two(num_experts),
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
        TRIES=MAX_POLLS,
        num_warps=up.warps,
        num_stages=min(up.stages, low.stages),
        **launch_options(x.device, config.pdl),
    )
    return out


def _bytes_ahead(tile: Tile, depth: int, x: Tensor) -> int:
    """Bytes of each weight row to prefetch; 0 if rows do not start at multiples of 16 bytes, or without a GPU."""
    row = depth * x.element_size()
    return 0 if row % 16 or x.device.type != "cuda" else min(tile.ahead * tile.depth * x.element_size(), row)


def combine(outputs: Tensor, weights: Tensor, pdl: bool = False, counts: Tensor | None = None) -> Tensor:
    """Slots [T k, H] -> tokens [T, H]: each token's k slots weighted and added in the order of its choices. Resets
    `counts` to zero."""
    tokens, top_k = weights.shape
    hidden = outputs.shape[1]
    out = torch.empty((tokens, hidden), dtype=outputs.dtype, device=outputs.device)
    block = min(1024, power_of_two(hidden))
    kernels.combine_kernel[(tokens, triton.cdiv(hidden, block))](
        outputs,
        weights,
        out,
        out if counts is None else counts,
        H=hidden,
        TOP_K=top_k,
        BLOCK=block,
        EXPERTS=0 if counts is None else counts.numel(),
        EXPERT_BLOCK=1 if counts is None else power_of_two(counts.numel()),
        num_warps=4,
        **launch_options(out.device, pdl),
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
    """The down product, weighted and added over each token's choices: slots [T k, I] -> tokens [T, H]."""
    tokens, top_k = ids.shape
    out = torch.empty((tokens, w.shape[1]), dtype=hidden.dtype, device=hidden.device)
    kernels.vector_down_kernel[(tokens, triton.cdiv(w.shape[1], tile.columns))](
        hidden,
        w,
        out,
        weights,
        ids,
        TOP_K=top_k,
        CHOICES=power_of_two(top_k),
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
    groups = group(ids, down.shape[0], config.pdl)
    return combine(_grouped(x, groups, gate_up, down, kind, config), weights, config.pdl)


def _shape_of(x: Tensor, down: Tensor, top_k: int, gpu: Gpu | None) -> MoeShape:
    num_experts, hidden, inner = down.shape
    return MoeShape(num_experts, top_k, hidden, inner, x.element_size(), gpu or gpu_of(x.device))


def _grouped(x: Tensor, groups: Groups, gate_up: Tensor, down: Tensor, kind: Activation, config: MoeConfig) -> Tensor:
    """[slots, H]"""
    activated = grouped_product(x, gate_up, groups, kind, config.gate_up, config.pdl)
    return grouped_product(activated, down, groups, None, config.down, config.pdl)


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
    """`route`, then `experts`; grouped results are left unsummed. `counters` [2, E] must be zero; summing the result
    resets them. Calls that may run concurrently need separate counters."""
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


def summed(parts: Tensor | Unsummed, pdl: bool = True) -> Tensor:
    """[T, H]; for an Unsummed, an extra kernel computes the sums."""
    return parts if isinstance(parts, Tensor) else combine(parts.outputs, parts.weights, pdl, parts.counters)
