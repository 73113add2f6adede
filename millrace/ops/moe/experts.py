"""The experts of a mixture: the k chosen MLPs of each token, weighted and summed.

make(weights, activation, linear) -> Experts. `weights` yields (gate_up [2 I, H], down [H, I]) expert by expert,
`linear` makes a Linear. A version that stacks or packs weights holds at most one expert twice while it does so. The k
outputs of a token are summed in the order in which they were chosen, whatever the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.ops.base.activation_kind import Activation, ClampedSwiglu, ExpertActivation
from millrace.ops.base.capability import capability
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.base.version import Shape, Version
from millrace.ops.cpp.native import DTYPES, native, native_missing
from millrace.ops.elementwise.activation import ACTIVATION_CODES, activate
from millrace.ops.linear.dense import Linear, addresses_of
from millrace.ops.moe.router import Route
from millrace.ops.triton import triton_missing


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer; `pairs` is read once, in order."""

    count: int
    pairs: Iterable[tuple[Any, Any]]
    """(gate_up, down): Tensors, or any weight that `linear` accepts if the version calls it."""
    biases: tuple[Tensor, Tensor] | None = None
    """Of gate_up [E, 2 I] and of down [E, H]."""


class Experts(ABC):
    """Base of all versions."""

    num_bytes: int

    @abstractmethod
    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """x [T, H], weights float32 [T, k], expert_ids int32 or int64 [T, k], distinct within a row -> [T, H]"""
        ...

    def routed(
        self, x: Tensor, logits: Tensor, top_k: int, renormalise: bool, *, route: Route, unsummed: bool = False
    ) -> Tensor | Unsummed:
        """x [T, H], router logits [T, E] -> [T, H]. A version that does the routing too, in fewer kernels, ignores
        `route`. With `unsummed` the sums may be left to the norm that follows."""
        return self(x, *route(logits, top_k, renormalise))


MakeLinear = Callable[[Any, Tensor | None], Linear]
CLAMPED = 3
"""Code of `ClampedSwiglu` in cpp/experts.cpp, beside `ACTIVATION_CODES`."""


def gate(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    left, right = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiglu):
        return _clamped(left, right, activation)
    return activate(left, activation).mul_(right)


def _clamped(left: Tensor, right: Tensor, own: ClampedSwiglu) -> Tensor:
    """The sigmoids are computed in rows with a gap between them. Torch takes rows without one as one long row, and
    computes the last numbers of a row with other instructions: a token's result would depend on the batch."""
    kept, shares = left.new_empty((*left.shape[:-1], 2 * left.shape[-1])).chunk(2, dim=-1)
    torch.clamp(left, max=own.limit, out=kept)
    torch.mul(kept, own.slope, out=shares)
    return kept * shares.sigmoid_() * (right.clamp(-own.limit, own.limit) + 1)


def combine(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Undo the sorting `order` of expert outputs [T k, H], and compute the weighted sum of each token's k outputs."""
    num_tokens, top_k = weights.shape
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    by_token = outputs[inverse].view(num_tokens, top_k, -1)
    return (by_token.float() * weights[..., None]).sum(dim=1).to(outputs.dtype)


class LoopExperts(Experts):
    """The reference: one expert after the other. The host waits for the number of tokens of each expert."""

    def __init__(self, weights: ExpertWeights, activation: ExpertActivation, linear: MakeLinear) -> None:
        biases: Iterable[tuple[Tensor | None, Tensor | None]] = repeat((None, None))
        if weights.biases is not None:
            biases = zip(*weights.biases, strict=True)
        self.experts = [
            tuple(linear(matrix, bias) for matrix, bias in zip(pair, own, strict=True))
            for pair, own in zip(weights.pairs, biases, strict=False)
        ]
        self.activation: ExpertActivation = activation
        self.num_bytes = sum(up.num_bytes + down.num_bytes for up, down in self.experts)

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        top_k = expert_ids.shape[1]
        flat = expert_ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts: list[int] = torch.bincount(flat, minlength=len(self.experts)).tolist()
        inputs = x[order // top_k]
        outputs = torch.empty_like(inputs)
        start = 0
        for (gate_up, down), count in zip(self.experts, counts, strict=True):
            if count:
                chosen = slice(start, start + count)
                outputs[chosen] = down(gate(gate_up(inputs[chosen]), self.activation))
                start += count
        return combine(outputs, order, weights)


class NativeExperts(LoopExperts):
    """All experts in one call, in C++, if all their weights have C++ kernels; else as the reference."""

    def __init__(self, weights: ExpertWeights, activation: ExpertActivation, linear: MakeLinear) -> None:
        super().__init__(weights, activation, linear)
        tables = [addresses_of([pair[half] for pair in self.experts]) for half in (0, 1)]
        self._tables = None if None in tables else tables
        self._call = native().without_gil.experts
        self._gate = (
            (CLAMPED, activation.slope, activation.limit)
            if isinstance(activation, ClampedSwiglu)
            else (ACTIVATION_CODES[activation], 0.0, 0.0)
        )

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        if self._tables is None:
            return super().__call__(x, weights, expert_ids)
        x, weights, expert_ids = x.contiguous(), weights.contiguous(), expert_ids.long().contiguous()
        out, count = torch.empty_like(x), len(self.experts)
        inputs = (x.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        self._call(DTYPES[x.dtype], *self._tables, count, *self._gate, *inputs, *expert_ids.shape)
        return out


class StackedExperts(Experts):
    """Base of the versions that stack all experts into two tensors, [E, 2 I, H] and [E, H, I]."""

    def __init__(self, weights: ExpertWeights, activation: ExpertActivation, linear: MakeLinear | None = None) -> None:
        self.activation: ExpertActivation = activation
        self.biases = weights.biases
        self.gate_up, self.down = _stack(weights)
        self.num_bytes = self.gate_up.nbytes + self.down.nbytes


def _stack(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    stacks: tuple[Tensor, Tensor] | None = None
    for index, pair in enumerate(weights.pairs):
        if stacks is None:
            first, second = (part.new_empty((weights.count, *part.shape)) for part in pair)
            stacks = (first, second)
        for stack, part in zip(stacks, pair, strict=True):
            stack[index] = part
    if stacks is None:
        raise ValueError("a mixture of experts needs at least one expert")
    return stacks


class GroupedExperts(StackedExperts):
    """Two grouped matrix products; group boundaries stay on the device, so that the host never waits."""

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        flat = expert_ids.flatten()
        order = torch.argsort(flat, stable=True)
        ends = _group_ends(flat, self.gate_up.shape[0])
        inputs = x[order // expert_ids.shape[1]]
        hidden = gate(torch._grouped_mm(inputs, self.gate_up.mT, offs=ends), self.activation)
        return combine(torch._grouped_mm(hidden, self.down.mT, offs=ends), order, weights)


def _group_ends(flat: Tensor, num_experts: int) -> Tensor:
    experts = torch.arange(num_experts, device=flat.device)
    return (flat[:, None] <= experts).sum(dim=0).to(torch.int32)


class DenseExperts(StackedExperts):
    """Every expert over every token, unchosen ones with weight zero: wasteful, but the host never waits."""

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        expert_weights = torch.zeros((x.shape[0], self.gate_up.shape[0]), device=x.device)
        expert_weights.scatter_(1, expert_ids.long(), weights)
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(self.gate_up.shape[0]):
            first, second = (None, None) if self.biases is None else (part[expert] for part in self.biases)
            hidden = gate(F.linear(x, self.gate_up[expert], first), self.activation)
            total += F.linear(hidden, self.down[expert], second).float() * expert_weights[:, expert, None]
        return total.to(x.dtype)


class FusedExperts(StackedExperts):
    """Base of the versions whose kernels have no biases, and only activations with a name (`_is_simple`)."""

    def __init__(self, weights: ExpertWeights, activation: ExpertActivation) -> None:
        if weights.biases is not None or isinstance(activation, ClampedSwiglu):
            raise ValueError("fused experts have neither biases nor a clamped activation")
        super().__init__(weights, activation)
        self.kind: Activation = activation


class TritonExperts(FusedExperts):
    """Triton products that gather each expert's tokens; tile sizes depend on the number of tokens."""

    def __init__(self, weights: ExpertWeights, activation: Activation, linear: MakeLinear) -> None:
        from millrace.ops.triton.moe import config as moe_config
        from millrace.ops.triton.moe import experts as moe

        super().__init__(weights, activation)
        self._experts, self._routed, self._summed = moe.experts, moe.routed_experts, moe.summed
        self._gpu = moe_config.gpu_of(self.gate_up.device)
        self.counters = torch.zeros((2, weights.count), dtype=torch.int32, device=self.gate_up.device)

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        return self._experts(x, weights, expert_ids, self.gate_up, self.down, self.kind, None, self._gpu)

    def routed(
        self, x: Tensor, logits: Tensor, top_k: int, renormalise: bool, *, route: Route, unsummed: bool = False
    ) -> Tensor | Unsummed:
        parts = self._routed(
            x, logits, top_k, renormalise, self.gate_up, self.down, self.kind, self.counters, gpu=self._gpu
        )
        return parts if unsummed else self._summed(parts)


class FixedTritonExperts(FusedExperts):
    """As TritonExperts, with one tile size for any number of tokens: a token's sums do not depend on the batch."""

    def __init__(self, weights: ExpertWeights, activation: Activation, linear: MakeLinear) -> None:
        from millrace.ops.triton.moe import config as moe_config
        from millrace.ops.triton.moe import experts as moe

        super().__init__(weights, activation)
        self._experts, self._config = moe.experts, moe_config.FIXED
        self._gpu = moe_config.gpu_of(self.gate_up.device)

    def __call__(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        return self._experts(x, weights, expert_ids, self.gate_up, self.down, self.kind, self._config, self._gpu)


def _grouped_mm_missing(device: torch.device) -> str:
    if not hasattr(torch, "_grouped_mm"):
        return "needs a torch with grouped matrix products"
    return "" if capability(device) >= (9, 0) else "needs compute capability 9.0"


def _is_plain(shape: Shape) -> bool:
    return not shape.get("stored", False)


def _is_simple(shape: Shape) -> bool:
    """Without biases and with an activation of one name, which the fused kernels need."""
    return _is_plain(shape) and not shape.get("biased", False)


VERSIONS = (
    Version(
        op="experts",
        name="native",
        make=NativeExperts,
        when="C++: all experts, their activation and the weighted sum in one call",
        devices=("cpu",),
        dtypes=tuple(DTYPES),
        invariant_on=("cpu",),
        missing=native_missing,
    ),
    Version(
        op="experts",
        name="triton",
        make=TritonExperts,
        when="no permutation: two products that gather an expert's tokens; tile sizes depend on the number of tokens",
        devices=("cuda",),
        fits=_is_simple,
        missing=triton_missing,
    ),
    Version(
        op="experts",
        name="triton_fixed",
        make=FixedTritonExperts,
        when="as triton, with one tile size, so that the batch cannot change a token's result",
        devices=("cuda",),
        invariant_on=("cuda",),
        fits=_is_simple,
        missing=triton_missing,
    ),
    Version(
        op="experts",
        name="grouped",
        make=GroupedExperts,
        when="tokens sorted by expert, two grouped products, no wait on the host",
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        fits=lambda shape: _is_simple(shape) and shape["in_features"] % 8 == 0 and shape["inner_features"] % 8 == 0,
        missing=_grouped_mm_missing,
    ),
    Version(
        op="experts",
        name="dense",
        make=DenseExperts,
        when="every expert over every token; the host never waits for the routing",
        devices=("cuda",),
        fits=_is_plain,
    ),
    Version(
        op="experts",
        name="loop",
        make=LoopExperts,
        when="the reference: tokens sorted by expert, then one expert after the other",
        devices=("cpu",),
        invariant_on=("cpu",),
    ),
)
