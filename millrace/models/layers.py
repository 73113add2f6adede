"""The weights of a decoder: its layers, their MLPs, the embedding and the LM head, each bound to its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from millrace.models.decode_spans import ALL_DECODE, apply_by_span
from millrace.ops.attention.qkv import PrepareQkv
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.head.embedding import Embedding
from millrace.ops.linear.dense import Head, Linear, ResidualAdder
from millrace.ops.linear.gated import GatedLinear
from millrace.ops.moe.experts import Experts, RoutingExperts


class Mlp(Protocol):
    @property
    def takes_fp8(self) -> bool: ...

    def __call__(self, x: Any) -> Tensor | Unsummed:
        """[T, hidden] -> [T, hidden]. The input is a Tensor or, if `takes_fp8`, `Quantised`; the result goes to a
        norm."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: GatedLinear
    down: Linear

    @property
    def takes_fp8(self) -> bool:
        return self.gate_up.takes_fp8

    def __call__(self, x: Any) -> Tensor:
        return self.down(self.gate_up(x, quantise=self.down.takes_fp8))

    def decode(self, x: Tensor) -> Tensor:
        """The MLP with the kernels for decode rows."""
        gated: Any = apply_by_span(self.gate_up, x, ALL_DECODE)
        result: Tensor = apply_by_span(self.down, gated, ALL_DECODE)
        return result

    def adds(self, rows: int) -> bool:
        return isinstance(self.down, ResidualAdder) and self.down.adds(rows)

    def add_to(self, x: Any, total: Tensor) -> None:
        assert isinstance(self.down, ResidualAdder)
        self.down.add_to(self.gate_up(x), total)


@dataclass(frozen=True, slots=True)
class MoeMlp:
    router: Linear
    experts: Experts
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    top_k: int
    renormalise: bool
    norms_add: bool = False
    """True if the norms accept `Unsummed`."""
    takes_fp8: bool = False

    def __call__(self, x: Tensor) -> Tensor | Unsummed:
        logits = self.router(x)
        if isinstance(self.experts, RoutingExperts):
            return self.experts.routed(x, logits, self.top_k, self.renormalise, unsummed=self.norms_add)
        weights, expert_ids = self.route(logits, self.top_k, self.renormalise)
        return self.experts(x, weights, expert_ids)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights and bound ops of one layer. Norm weights are float32 and include the family's offset."""

    input_norm: Tensor
    qkv: Linear
    prepare_qkv: PrepareQkv
    out: Linear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp
    mlp_out_norm: Tensor | None
    rope: int | None
    window: int | None
    kv_group: int
    kv_index: int
    """The KV tensor of the pool that holds this layer's keys and values, in the blocks of its group."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: Head
    frequencies: tuple[Tensor, ...]
    """Inverse frequencies of each of the spec's ropes, float32 on the device."""
    num_bytes: int
