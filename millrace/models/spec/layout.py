"""The tensors that a spec needs, by Hugging Face name and shape, and how they are fused into matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from millrace.models.spec.families import WeightNames, family_named
from millrace.models.spec.model_spec import LayerSpec, MixerKind, ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name and shape of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight of a linear: its parts stacked by rows, and likewise the biases (none, or one per part)."""

    parts: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def all_tensors(self) -> tuple[TensorSpec, ...]:
        return self.parts + self.biases


@dataclass(frozen=True, slots=True)
class MoeLayout:
    router: Matrix
    experts: tuple[tuple[Matrix, Matrix], ...]
    """Per expert (gate_up, down)."""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    qkv: Matrix
    q_norm: TensorSpec | None
    k_norm: TensorSpec | None
    out: Matrix

    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out

    def norms(self) -> tuple[TensorSpec, ...]:
        """Tensors that are kept in float32."""
        return tuple(norm for norm in (self.q_norm, self.k_norm) if norm is not None)


MixerLayout = AttentionLayout
"""The tensors of a mixer, of whatever kind: its matrices and its norms."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    input_norm: TensorSpec
    mixer: MixerLayout
    mixer_out_norm: TensorSpec | None
    mlp_norm: TensorSpec
    mlp: tuple[Matrix, Matrix] | MoeLayout
    """(gate_up, down), or a mixture of experts."""
    mlp_out_norm: TensorSpec | None


@dataclass(frozen=True, slots=True)
class ModelLayout:
    embedding: TensorSpec
    layers: tuple[LayerLayout, ...]
    final_norm: TensorSpec
    head: Matrix | None
    """The LM head; None if it is tied to the embedding."""


def layout_of(spec: ModelSpec) -> ModelLayout:
    names = family_named(spec.family).names
    vocabulary = (spec.vocab_size, spec.hidden_size)
    return ModelLayout(
        embedding=TensorSpec(EMBEDDING, vocabulary),
        layers=tuple(_layer(spec, names, index, layer) for index, layer in enumerate(spec.layers)),
        final_norm=TensorSpec(FINAL_NORM, (spec.hidden_size,)),
        head=None if spec.tied_head else Matrix((TensorSpec(HEAD, vocabulary),)),
    )


def _layer(spec: ModelSpec, names: WeightNames, index: int, layer: LayerSpec) -> LayerLayout:
    prefix = f"model.layers.{index}."

    def norm(name: str) -> TensorSpec:
        return TensorSpec(f"{prefix}{name}.weight", (spec.hidden_size,))

    return LayerLayout(
        input_norm=norm(names.input_norm),
        mixer=MIXER_LAYOUTS[layer.mixer](spec, prefix),
        mixer_out_norm=norm(names.attention_out_norm) if spec.sandwich_norms else None,
        mlp_norm=norm(names.mlp_norm),
        mlp=_moe(spec, names, prefix) if layer.is_moe else _mlp(spec, prefix),
        mlp_out_norm=norm(names.mlp_out_norm) if spec.sandwich_norms else None,
    )


def _attention(spec: ModelSpec, prefix: str) -> AttentionLayout:
    attention = prefix + "self_attn."

    def head_norm(name: str) -> TensorSpec | None:
        return TensorSpec(f"{attention}{name}.weight", (spec.head_dim,)) if spec.qk_norm else None

    rows = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    return AttentionLayout(
        qkv=_matrix(attention, rows, spec.hidden_size, spec.qkv_bias),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=_matrix(attention, {"o_proj": spec.hidden_size}, spec.q_size, spec.out_bias),
    )


MIXER_LAYOUTS: Mapping[MixerKind, Callable[[ModelSpec, str], MixerLayout]] = {"attention": _attention}
"""The tensors of each kind of mixer in the layer with this prefix."""


def _matrix(prefix: str, rows: dict[str, int], columns: int, has_bias: bool = False) -> Matrix:
    parts = tuple(TensorSpec(f"{prefix}{name}.weight", (count, columns)) for name, count in rows.items())
    biases = tuple(TensorSpec(f"{prefix}{name}.bias", (count,)) for name, count in rows.items())
    return Matrix(parts, biases if has_bias else ())


def _mlp(spec: ModelSpec, prefix: str) -> tuple[Matrix, Matrix]:
    up = {"mlp.gate_proj": spec.inner_size, "mlp.up_proj": spec.inner_size}
    down = {"mlp.down_proj": spec.hidden_size}
    return (
        _matrix(prefix, up, spec.hidden_size, spec.mlp_bias),
        _matrix(prefix, down, spec.inner_size, spec.mlp_bias),
    )


def _moe(spec: ModelSpec, names: WeightNames, prefix: str) -> MoeLayout:
    if spec.moe is None:
        raise ValueError("a layer has experts, but the spec has no MoeSpec")
    inner, hidden = spec.moe.inner_size, spec.hidden_size
    experts = []
    for expert in range(spec.moe.num_experts):
        gate, up, down = (name.format(e=expert) for name in (names.expert_gate, names.expert_up, names.expert_down))
        experts.append((_matrix(prefix, {gate: inner, up: inner}, hidden), _matrix(prefix, {down: hidden}, inner)))
    return MoeLayout(_matrix(prefix, {names.router: spec.moe.num_experts}, hidden), tuple(experts))


# --- iterating over a layout ---


def matrices_of(layer: LayerLayout) -> Iterator[Matrix]:
    yield from layer.mixer.matrices()
    if isinstance(layer.mlp, MoeLayout):
        yield layer.mlp.router
        for pair in layer.mlp.experts:
            yield from pair
    else:
        yield from layer.mlp


def norms_of(layer: LayerLayout) -> Iterator[TensorSpec]:
    yield from layer.mixer.norms()
    found = (layer.input_norm, layer.mixer_out_norm, layer.mlp_norm, layer.mlp_out_norm)
    yield from (norm for norm in found if norm is not None)


def all_tensors(layout: ModelLayout) -> Iterator[TensorSpec]:
    """Every tensor that the model needs."""
    yield layout.embedding
    for layer in layout.layers:
        yield from norms_of(layer)
        for matrix in matrices_of(layer):
            yield from matrix.all_tensors()
    yield layout.final_norm
    if layout.head is not None:
        yield from layout.head.all_tensors()
