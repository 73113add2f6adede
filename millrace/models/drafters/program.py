"""Drafters that run: EAGLE layers and Medusa heads, made of the decoder's ops, over the engine's paged KV.

One step of a chain, for the T tokens of a batch: the caller pairs token i + 1 with the target's hidden state at i, and
gives both the position i. `step` writes the pair's keys and values and returns the state that stands in for the
target's hidden state at i + 1; its logits are the draft for i + 2. `modules.py` defines the meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.models.angles import Angles
from millrace.models.batch import ForwardBatch
from millrace.models.drafters.spec import DrafterSpec
from millrace.models.layers import DecoderLayer
from millrace.models.mixers import MixerStep
from millrace.models.native_stack import NativeStack
from millrace.models.op_program import DecoderOps
from millrace.ops.attention import Attention
from millrace.ops.linear.dense import Head, Linear

Embed = Callable[[Tensor], Tensor]
"""int64 [T] -> [T, hidden]"""
Logits = Callable[[Tensor], Tensor]
"""[n, hidden] -> float32 [n, draft vocabulary]"""


@dataclass(frozen=True, slots=True)
class DraftStates:
    hidden: Tensor
    """[T, hidden]: the hidden states of the next step of the chain."""
    for_head: Tensor
    """[T, hidden]: what `logits` takes."""


class TokenMap:
    """From draft ids to the target's token ids; the identity without a map."""

    def __init__(self, ids: Tensor | None) -> None:
        self.ids = ids
        """int64 [draft vocabulary], or None."""

    def __call__(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.ids is None else self.ids[draft_ids]


@dataclass(frozen=True, slots=True)
class EagleWeights:
    embed: Embed
    fc: Linear
    layers: tuple[DecoderLayer, ...]
    """Their mixers count KV tensors from 0, the first of the drafter's, in KV group 0. The first layer's `input_norm`
    is not used if the spec has none."""
    head: Head | None
    """None: the target's."""
    logits: Logits
    """Of the head."""
    hidden_norm: Tensor | None
    """EAGLE-3: norm of the hidden state in the first layer."""
    embedding_norm: Tensor | None
    fc_norms: tuple[Tensor, ...]
    """EAGLE-3: norms of the target's states before `fc`: none, one for all joined, or one each."""
    final_norm: Tensor | None


class EagleDrafter:
    """EAGLE and EAGLE-3. Keeps no state between steps; the KV tensors are passed in."""

    def __init__(
        self,
        spec: DrafterSpec,
        weights: EagleWeights,
        ops: DecoderOps,
        angles: Angles,
        token_ids: TokenMap,
        native_stack: NativeStack | None = None,
    ) -> None:
        """`native_stack`: the same in C++, if all its parts have such a version."""
        assert spec.decoder is not None
        self.spec, self.native_stack = spec, native_stack
        self.token_ids = token_ids
        self.logits = weights.logits
        self._weights, self._ops, self._angles, self._eps = weights, ops, angles, spec.decoder.norm_eps

    @property
    def attention(self) -> Attention:
        return self._ops.attention

    @torch.inference_mode()
    def fuse(self, states: Tensor) -> Tensor:
        """The target's states [T, states · hidden], those of `spec.target_layers` joined, as the hidden states of the
        first step of a chain. The identity for EAGLE, which takes the states after the final norm."""
        if self.spec.kind == "eagle":
            return states
        norms = self._weights.fc_norms
        if self.spec.norm_before_fc:
            states = self._norm(states, norms[0])
        elif self.spec.norm_each_state:
            parts = states.chunk(len(norms), dim=-1)
            states = torch.cat([self._norm(part, own) for part, own in zip(parts, norms, strict=True)], dim=-1)
        return self._weights.fc(states)

    @torch.inference_mode()
    def step(self, hidden: Tensor, batch: ForwardBatch, kv: Sequence[Tensor]) -> DraftStates:
        """One step for `batch.token_ids` and the hidden states before them [T, hidden], which may be overwritten.
        `kv`: the drafter's KV tensors, in the blocks of KV group 0 of the batch."""
        states = self._run(hidden, batch, kv, only_writes=False)
        assert states is not None
        return states

    @torch.inference_mode()
    def write(self, hidden: Tensor, batch: ForwardBatch, kv: Sequence[Tensor]) -> None:
        """`step`, of which only the keys and values are needed."""
        self._run(hidden, batch, kv, only_writes=True)

    def _run(
        self, hidden: Tensor, batch: ForwardBatch, kv: Sequence[Tensor], *, only_writes: bool
    ) -> DraftStates | None:
        ops, weights, layers = self._ops, self._weights, self._weights.layers
        step = MixerStep(batch, kv, ops.attention, self._angles.of(batch.positions))
        step.prepare([layer.mixer for layer in layers])
        x, residual = self._first_input(weights.embed(batch.token_ids), hidden)
        for index, layer in enumerate(layers):
            if index:
                x = self._norm(residual, layer.input_norm)
            if only_writes and index + 1 == len(layers):
                layer.mixer.write(x, step)
                return None
            x = layer.mixer.out(layer.mixer.mix(x, step))
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, self._eps)
            assert layer.mlp is not None
            residual = residual + _dense(layer.mlp(x))
        return self._states(residual)

    def _first_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(input of the first layer's QKV projection, residual)."""
        weights, first = self._weights, self._weights.layers[0]
        if weights.hidden_norm is not None:
            normed = self._norm(hidden, weights.hidden_norm)
            x = torch.cat((self._norm(embedded, first.input_norm), normed), dim=-1)
            return x, normed if self.spec.norm_before_residual else hidden
        if weights.embedding_norm is not None:
            embedded = self._norm(embedded, weights.embedding_norm)
        residual = weights.fc(torch.cat((embedded, hidden), dim=-1))
        return self._norm(residual, first.input_norm) if self.spec.has_input_norm else residual, residual

    def _states(self, residual: Tensor) -> DraftStates:
        norm = self._weights.final_norm
        if norm is None:
            return DraftStates(residual, residual)
        normed = self._norm(residual, norm)
        return DraftStates(normed if self.spec.returns_normed else residual, normed)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x itself without a weight."""
        if weight is None:
            return x
        normed: Tensor = self._ops.norm(x, weight, self._eps)
        return normed


class MedusaDrafter:
    """Medusa heads: head h drafts the token h + 2 places after the hidden state's own token."""

    def __init__(
        self,
        spec: DrafterSpec,
        blocks: Sequence[Sequence[Linear]],
        heads: Sequence[Head] | None,
        target_logits: Logits,
        token_ids: TokenMap,
    ) -> None:
        """`heads`: one for each Medusa head or one for all; None: the target's."""
        self.spec = spec
        self.token_ids = token_ids
        self._blocks, self._heads, self._target_logits = blocks, heads, target_logits

    @torch.inference_mode()
    def logits(self, hidden: Tensor, num_drafts: int | None = None) -> Tensor:
        """The target's hidden states after the final norm [n, hidden] -> float32 [drafts, n, draft vocabulary]."""
        count = self.spec.num_medusa_heads if num_drafts is None else num_drafts
        states = [self._state(hidden, self._blocks[index]) for index in range(count)]
        heads = self._heads
        if heads is not None and len(heads) > 1:
            return torch.stack([head.wide(state) for head, state in zip(heads, states, strict=False)])
        logits = (self._target_logits if heads is None else heads[0].wide)(torch.cat(states))
        return logits.view(count, hidden.shape[0], -1)

    @staticmethod
    def _state(x: Tensor, blocks: Sequence[Linear]) -> Tensor:
        for block in blocks:
            x = x + F.silu(block(x))
        return x


Drafter = EagleDrafter | MedusaDrafter


def _dense(x: Any) -> Tensor:
    assert isinstance(x, Tensor), "drafters have dense MLPs"
    return x
