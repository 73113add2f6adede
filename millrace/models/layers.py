"""The weights of a decoder: its layers, their MLPs, the embedding and the LM head, each bound to its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.models.adapters.slots import LayerAdapters
from millrace.models.adapters.targets import DOWN, GATE_UP
from millrace.models.decode_spans import Span, apply_by_span
from millrace.models.mixers.base import Mixer
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.head.embedding import Embedding
from millrace.ops.linear.dense import Head, Linear
from millrace.ops.linear.gated import GatedLinear


class Mlp(Protocol):
    """An MLP declares what it can do as a Linear does (`ops/linear/dense.py`)."""

    @property
    def takes_fp8(self) -> bool: ...

    @property
    def has_decode_kernel(self) -> bool: ...

    def __call__(self, x: Any) -> Tensor | Unsummed:
        """[T, hidden] -> [T, hidden]. The input is a Tensor or, if `takes_fp8`, `Quantised`; the result goes to a
        norm."""
        ...

    def decode(self, x: Any) -> Tensor | Unsummed: ...

    def adds(self, rows: int) -> bool: ...

    def add_to(self, x: Any, total: Tensor) -> None: ...

    def adapted(self, x: Tensor, spans: tuple[Span, ...], adapters: LayerAdapters) -> Tensor | Unsummed:
        """`apply_by_span` with what adapters add to its linears."""
        ...


def adapted_linear(linear: Linear, x: Tensor, spans: tuple[Span, ...], adapters: LayerAdapters, kind: int) -> Tensor:
    """`apply_by_span` with what adapters add. Over ranks, each adds its part before the sum."""
    own: Tensor = apply_by_span(linear.own_part, x, spans)
    adapters.add(kind, x, own)
    return linear.total(own)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: GatedLinear
    down: Linear

    @property
    def takes_fp8(self) -> bool:
        return self.gate_up.takes_fp8

    @property
    def has_decode_kernel(self) -> bool:
        return self.gate_up.has_decode_kernel or self.down.has_decode_kernel

    def __call__(self, x: Any) -> Tensor:
        return self.down(self.gate_up(x, quantise=self.down.takes_fp8))

    def decode(self, x: Any) -> Tensor:
        return self.down.decode(self.gate_up.decode(x))

    def adds(self, rows: int) -> bool:
        return self.down.adds(rows)

    def add_to(self, x: Any, total: Tensor) -> None:
        self.down.add_to(self.gate_up(x), total)

    def plus(self, x: Any, total: Tensor) -> Tensor:
        """self(x) + total, which may be overwritten."""
        return self.down.plus(self.gate_up(x, quantise=self.down.takes_fp8), total)

    def adapted(self, x: Tensor, spans: tuple[Span, ...], adapters: LayerAdapters) -> Tensor:
        gate_up: Tensor = apply_by_span(self.gate_up.linear, x, spans)
        adapters.add(GATE_UP, x, gate_up)
        inner = self.gate_up.gated(gate_up)
        return adapted_linear(self.down, inner, spans, adapters, DOWN)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """Two linears with an activation between them."""

    up: Linear
    activation: Callable[..., Any]
    down: Linear

    @property
    def takes_fp8(self) -> bool:
        return self.up.takes_fp8

    @property
    def has_decode_kernel(self) -> bool:
        return self.up.has_decode_kernel or self.down.has_decode_kernel

    def __call__(self, x: Any) -> Tensor:
        return self.down(self.activation(self.up(x), quantise=self.down.takes_fp8))

    def decode(self, x: Any) -> Tensor:
        return self.down.decode(self.activation(self.up.decode(x)))

    def adds(self, rows: int) -> bool:
        return self.down.adds(rows)

    def add_to(self, x: Any, total: Tensor) -> None:
        self.down.add_to(self.activation(self.up(x)), total)

    def adapted(self, x: Tensor, spans: tuple[Span, ...], adapters: LayerAdapters) -> Tensor:
        up: Tensor = apply_by_span(self.up, x, spans)
        adapters.add(GATE_UP, x, up)
        return adapted_linear(self.down, self.activation(up), spans, adapters, DOWN)


@dataclass(frozen=True, slots=True)
class MoeMlp:
    router: Linear
    experts: Callable[[Tensor, Tensor], Tensor | Unsummed]
    """(x [T, hidden], router logits) -> [T, hidden]: chooses the experts of each token and sums their outputs."""
    takes_fp8: bool = False
    has_decode_kernel: bool = False

    def __call__(self, x: Tensor) -> Tensor | Unsummed:
        return self.experts(x, self.router(x))

    def decode(self, x: Tensor) -> Tensor | Unsummed:
        return self(x)

    def adds(self, rows: int) -> bool:
        return False

    def add_to(self, x: Tensor, total: Tensor) -> None:
        raise NotImplementedError

    def adapted(self, x: Tensor, spans: tuple[Span, ...], adapters: LayerAdapters) -> Tensor | Unsummed:
        result: Tensor | Unsummed = apply_by_span(self, x, spans)  # Adapters of experts are refused.
        return result


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """Experts, and an MLP that every token takes beside them."""

    routed: MoeMlp
    shared: DenseMlp
    gate: Linear | None
    """[hidden] -> [1]: its sigmoid is the share of that MLP. None: all of it."""
    takes_fp8: bool = False
    has_decode_kernel: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        routed = self.routed(x)
        assert isinstance(routed, Tensor)
        if self.gate is None:
            return self.shared.plus(x, routed)
        return routed + self.shared(x) * torch.sigmoid(self.gate(x))

    def decode(self, x: Tensor) -> Tensor:
        return self(x)

    def adds(self, rows: int) -> bool:
        return False

    def add_to(self, x: Tensor, total: Tensor) -> None:
        raise NotImplementedError

    def adapted(self, x: Tensor, spans: tuple[Span, ...], adapters: LayerAdapters) -> Tensor:
        return self(x)  # Adapters of experts are refused.


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A mixer and an MLP, each a branch of the residual. Norms are float32 and include the family's offset; a layer
    norm is [2, hidden], weight and bias."""

    input_norm: Tensor | None
    mixer: Mixer
    mixer_out_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: Mlp | None
    mlp_out_norm: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything that decides which kernels it launches."""
        return (
            *self.mixer.kind,
            type(self.mlp),
            *(norm is None for norm in (self.input_norm, self.mixer_out_norm, self.mlp_norm, self.mlp_out_norm)),
        )


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: Head
    frequencies: tuple[Tensor, ...]
    """Inverse frequencies of each of the spec's ropes, float32 on the device."""
    num_bytes: int
