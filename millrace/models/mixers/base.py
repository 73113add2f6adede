"""What every mixer is: the first half of a layer, between its input norm and its output projection."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.models.adapters.slots import LayerAdapters
from millrace.models.batch import ForwardBatch, LastTokens
from millrace.models.decode_spans import Span
from millrace.models.spec.layout import Matrix, MixerLayout, TensorSpec
from millrace.models.spec.model_spec import LayerSpec, ModelSpec
from millrace.ops.attention import Attention
from millrace.ops.base.mesh import Mesh
from millrace.ops.base.version import Choice
from millrace.ops.linear.dense import Linear


@dataclass(slots=True)
class MixerStep:
    """One forward pass as its mixers see it."""

    batch: ForwardBatch
    kv: Sequence[Tensor]
    """The cache tensors of the pool. A mixer knows the index of its own."""
    attention: Attention
    """The model's attention op, bound to its heads."""
    angles: Sequence[Tensor]
    """Per rope float32 [T, rotary_dim]: the angles of the tokens' positions."""
    spans: tuple[Span, ...] = ()
    """Tokens that take the same kernels; empty if all do (`apply_by_span`)."""
    adapters: LayerAdapters | None = None
    """What adapters add to the linears of the layer that computes; None if no token has one."""
    prepared: dict[Hashable, Any] = field(default_factory=dict)
    """By `Mixer.shares`."""

    def prepare(self, mixers: Sequence[Mixer]) -> None:
        """Do what mixers share, once for those that share it."""
        first = {mixer.shares: mixer for mixer in reversed(mixers)}
        self.prepared = {key: mixer.prepare(self) for key, mixer in first.items()}


class Mixer(Protocol):
    """A mixer keeps no state between steps: what it remembers of earlier tokens is in the cache tensors."""

    @property
    def out(self) -> Linear:
        """The output projection. The program applies it, because its result is added to the residual and normed."""
        ...

    @property
    def takes_fp8(self) -> bool:
        """True if `hidden` should be `Quantised`."""
        ...

    @property
    def has_decode_kernel(self) -> bool:
        """True if decode rows take other kernels, `out` included: then a step has spans."""
        ...

    @property
    def shares(self) -> Hashable:
        """Mixers with equal values take each other's `prepare`."""
        ...

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything that decides which kernels it launches, for a warm-up with one layer of each kind."""
        ...

    def prepare(self, step: MixerStep) -> Any:
        """What does not depend on hidden states, before the first layer. `mix` finds it in `step.prepared`."""
        ...

    def mix(self, hidden: Any, step: MixerStep) -> Tensor:
        """The normed hidden states [T, hidden], a Tensor or `Quantised` -> [T, inputs of `out`]. Writes what the tokens
        leave in the cache."""
        ...

    def mix_last(self, hidden: Any, step: MixerStep, last: LastTokens) -> Tensor:
        """`mix` for all tokens, of which only the results of these, at least one, are needed: [n, inputs of `out`]."""
        ...

    def write(self, hidden: Any, step: MixerStep) -> None:
        """`mix`, of which only what the tokens leave in the cache is needed."""
        ...


@dataclass(frozen=True, slots=True)
class MixerSite:
    """Where a mixer is built."""

    layer: LayerSpec
    layout: MixerLayout
    kv_group: int
    kv_index: int
    """The tensor of the pool that is this layer's cache, in the blocks of its group."""


class MixerBuilder(Protocol):
    """What a mixer is made with: the loader of a decoder."""

    def means(self, *parts: Tensor) -> list[Tensor]:
        """Of each part [T, own] of all ranks, the mean over the last dimension, float32 [T, 1]."""
        ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def counts_keys(self) -> bool:
        """False if another rank has the same KV heads and counts them in means over all ranks."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """Of this rank: with its own heads."""
        ...

    @property
    def device(self) -> torch.device: ...

    def choose(self, op: str, key: str = "", **shape: Any) -> Choice:
        """The version of an op for this device and dtype, listed under `key`."""
        ...

    def linear(self, matrix: Matrix, key: str, op: str = "") -> Linear: ...

    def summed(self, linear: Linear) -> Linear:
        """A linear whose result is added to the residual: over all ranks of a mesh."""
        ...

    def vector(self, part: TensorSpec, report: bool = True) -> Tensor:
        """As it is stored, in float32. `report`: whether its bytes count as loaded."""
        ...

    def matrix(self, part: TensorSpec) -> Tensor:
        """In the model's dtype, whatever the format of the file."""
        ...

    def norm(self, part: TensorSpec) -> Tensor:
        """A norm's weight: with the family's offset, in float32."""
        ...

    def optional_norm(self, part: TensorSpec | None) -> Tensor | None: ...
