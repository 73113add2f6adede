"""The tensors that a spec needs, by Hugging Face name and shape, and how they are fused into matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from millrace.models.spec.families import family_named
from millrace.models.spec.family import WeightNames
from millrace.models.spec.model_spec import LayerSpec, MixerKind, ModelSpec, RecurrentSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"


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


NormLayout = tuple[TensorSpec, ...]
"""The tensors of a norm of hidden states: its weight, then its bias, as far as it has them."""


@dataclass(frozen=True, slots=True)
class MoeLayout:
    router: Matrix
    experts: tuple[tuple[Matrix, Matrix], ...]
    """Per expert (gate_up, down)."""
    shared: tuple[Matrix, Matrix] | None = None
    """(gate_up, down) of the MLP that every token takes."""
    shared_gate: Matrix | None = None
    router_bias: TensorSpec | None = None
    """Added to the scores of experts when they are chosen."""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    qkv: Matrix
    q_norm: TensorSpec | None
    k_norm: TensorSpec | None
    out: Matrix
    sinks: TensorSpec | None = None

    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out

    def norms(self) -> tuple[TensorSpec, ...]:
        """Tensors that are kept in float32."""
        return tuple(part for part in (self.q_norm, self.k_norm, self.sinks) if part is not None)

    def reshaped(self) -> tuple[TensorSpec, ...]:
        """Matrices that are multiplied in another shape, always in the model's dtype."""
        return ()


@dataclass(frozen=True, slots=True)
class LatentLayout:
    inputs: Matrix
    """All that is computed from the hidden states: queries or what they are computed from, the latent, and the key that
    is rotated."""
    query_norm: TensorSpec | None
    query_up: Matrix | None
    latent_norm: TensorSpec
    up: TensorSpec
    """From a latent to each head's key and value."""
    out: Matrix

    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in (self.inputs, self.query_up, self.out) if matrix is not None)

    def norms(self) -> tuple[TensorSpec, ...]:
        return tuple(norm for norm in (self.query_norm, self.latent_norm) if norm is not None)

    def reshaped(self) -> tuple[TensorSpec, ...]:
        return (self.up,)


@dataclass(frozen=True, slots=True)
class RecurrentLayout:
    inputs: Matrix
    """All that is computed from the hidden states, in the order of the family."""
    conv: TensorSpec
    conv_bias: TensorSpec | None
    decay: TensorSpec
    """The logarithm of each head's decay per unit of time."""
    time_bias: TensorSpec
    skip: TensorSpec | None
    """Mamba2: what each head adds of its value to its result."""
    gate_norm: TensorSpec
    out: Matrix

    def matrices(self) -> tuple[Matrix, ...]:
        return self.inputs, self.out

    def norms(self) -> tuple[TensorSpec, ...]:
        """Tensors that are kept in float32."""
        found = (self.conv, self.conv_bias, self.decay, self.time_bias, self.skip, self.gate_norm)
        return tuple(part for part in found if part is not None)

    def reshaped(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class ConvLayout:
    inputs: Matrix
    """For each channel what its value is multiplied with before the convolution, and after it, and the value."""
    conv: TensorSpec
    conv_bias: TensorSpec | None
    out: Matrix

    def matrices(self) -> tuple[Matrix, ...]:
        return self.inputs, self.out

    def norms(self) -> tuple[TensorSpec, ...]:
        return (self.conv,) if self.conv_bias is None else (self.conv, self.conv_bias)

    def reshaped(self) -> tuple[TensorSpec, ...]:
        return ()


MixerLayout = AttentionLayout | LatentLayout | RecurrentLayout | ConvLayout
"""The tensors of a mixer, of whatever kind: its matrices and its norms."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    input_norm: NormLayout | None
    mixer: MixerLayout
    mixer_out_norm: NormLayout | None
    mlp_norm: NormLayout | None
    mlp: tuple[Matrix, Matrix] | MoeLayout | None
    """(gate_up, down), or a mixture of experts; None in a layer without one."""
    mlp_out_norm: NormLayout | None


@dataclass(frozen=True, slots=True)
class ModelLayout:
    embedding: TensorSpec
    layers: tuple[LayerLayout, ...]
    final_norm: NormLayout
    head: Matrix | None
    """The LM head; None if it is tied to the embedding."""


def layout_of(spec: ModelSpec) -> ModelLayout:
    names = family_named(spec.family).names
    vocabulary = (spec.vocab_size, spec.hidden_size)
    return ModelLayout(
        embedding=TensorSpec(EMBEDDING, vocabulary),
        layers=tuple(_layer(spec, names, index, layer) for index, layer in enumerate(spec.layers)),
        final_norm=_norm(spec, FINAL_NORM),
        head=None if spec.tied_head else head_of(spec, spec.vocab_size),
    )


def head_of(spec: ModelSpec, num_tokens: int) -> Matrix:
    """The LM head of so many tokens."""
    biases = (TensorSpec(HEAD_BIAS, (num_tokens,)),) if spec.head_bias else ()
    return Matrix((TensorSpec(HEAD, (num_tokens, spec.hidden_size)),), biases)


def _norm(spec: ModelSpec, name: str) -> NormLayout:
    kinds = [kind for kind, exists in (("weight", spec.norm_weight), ("bias", spec.norm_bias)) if exists]
    return tuple(TensorSpec(f"{name}.{kind}", (spec.hidden_size,)) for kind in kinds)


def _layer(spec: ModelSpec, names: WeightNames, index: int, layer: LayerSpec) -> LayerLayout:
    prefix = f"model.layers.{index}."

    def norm(name: str, exists: bool) -> NormLayout | None:
        return _norm(spec, prefix + name) if exists else None

    return LayerLayout(
        input_norm=norm(names.input_norm, spec.input_norms),
        mixer=MIXER_LAYOUTS[layer.mixer](spec, prefix),
        mixer_out_norm=norm(names.attention_out_norm, spec.sandwich_norms),
        mlp_norm=norm(names.mlp_norm, spec.input_norms and not spec.one_norm and layer.has_mlp),
        mlp=(_moe if layer.is_moe else _mlp)(spec, names, prefix) if layer.has_mlp else None,
        mlp_out_norm=norm(names.mlp_out_norm, spec.sandwich_norms and layer.has_mlp),
    )


def _attention(spec: ModelSpec, prefix: str) -> AttentionLayout:
    attention = prefix + "self_attn."

    def norm(name: str, size: int) -> TensorSpec | None:
        return TensorSpec(f"{attention}{name}.weight", (size,)) if spec.qk_norm else None

    names, sizes = family_named(spec.family).names.qkv, (spec.q_size, spec.kv_size, spec.kv_size)
    rows = {names[0]: sum(sizes)} if len(names) == 1 else dict(zip(names, sizes, strict=True))
    return AttentionLayout(
        qkv=_matrix(attention, rows, spec.hidden_size, spec.qkv_bias),
        q_norm=norm("q_norm", spec.qk_norm_sizes[0]),
        k_norm=norm("k_norm", spec.qk_norm_sizes[1]),
        out=_matrix(attention, {"o_proj": spec.hidden_size}, spec.q_size, spec.out_bias),
        sinks=TensorSpec(f"{attention}sinks", (spec.num_heads,)) if spec.attention_sinks else None,
    )


def _gated_attention(spec: ModelSpec, prefix: str) -> AttentionLayout:
    """The projection of queries also gives a gate of each head, after its query."""
    plain = _attention(spec, prefix)
    first, *others = plain.qkv.parts
    biases = tuple(replace(bias, shape=(2 * spec.q_size,)) for bias in plain.qkv.biases[:1]) + plain.qkv.biases[1:]
    wide = replace(first, shape=(2 * spec.q_size, spec.hidden_size))
    return replace(plain, qkv=Matrix((wide, *others), biases))


def _latent_attention(spec: ModelSpec, prefix: str) -> LatentLayout:
    own, hidden, prefix = spec.latent, spec.hidden_size, prefix + "self_attn."
    if own is None:
        raise ValueError("a layer has latent attention, but the spec has no LatentSpec")
    rows, has_rank = own.projected(spec.num_heads), own.query_rank is not None
    inputs = dict(zip(("q_a_proj" if has_rank else "q_proj", "kv_a_proj_with_mqa"), rows, strict=True))
    up = {"q_b_proj": own.query_size(spec.num_heads)}
    return LatentLayout(
        inputs=_matrix(prefix, inputs, hidden, spec.qkv_bias),
        query_norm=TensorSpec(f"{prefix}q_a_layernorm.weight", (own.query_rank,)) if own.query_rank else None,
        query_up=_matrix(prefix, up, own.query_rank) if own.query_rank else None,
        latent_norm=TensorSpec(f"{prefix}kv_a_layernorm.weight", (own.rank,)),
        up=TensorSpec(f"{prefix}kv_b_proj.weight", (spec.num_heads * (own.key_dim + own.value_dim), own.rank)),
        out=_matrix(prefix, {"o_proj": hidden}, spec.num_heads * own.value_dim, spec.out_bias),
    )


def _gated_delta(spec: ModelSpec, prefix: str) -> RecurrentLayout:
    own = _recurrent(spec)
    rows = {"in_proj_qkvz": own.num_projected("gated_delta") - 2 * own.heads, "in_proj_ba": 2 * own.heads}
    if not own.by_group:
        rows = {"in_proj_qkv": own.conv_channels, "in_proj_z": own.value_size}
        rows |= {"in_proj_b": own.heads, "in_proj_a": own.heads}
    return _recurrent_layout(spec, own, prefix + "linear_attn.", rows, norm_size=own.value_dim)


def _mamba2(spec: ModelSpec, prefix: str) -> RecurrentLayout:
    own, prefix = _recurrent(spec), prefix + "mamba."
    rows = {"in_proj": own.num_projected("mamba2")}
    layout = _recurrent_layout(spec, own, prefix, rows, norm_size=own.value_size)
    return replace(layout, skip=TensorSpec(f"{prefix}D", (own.heads,)))


def _short_conv(spec: ModelSpec, prefix: str) -> ConvLayout:
    own, prefix, size = _recurrent(spec), prefix + "conv.", _recurrent(spec).heads
    return ConvLayout(
        inputs=_matrix(prefix, {"in_proj": own.num_projected("short_conv")}, spec.hidden_size, own.linear_bias),
        conv=TensorSpec(f"{prefix}conv.weight", (size, 1, own.conv_width)),
        conv_bias=TensorSpec(f"{prefix}conv.bias", (size,)) if own.conv_bias else None,
        out=_matrix(prefix, {"out_proj": spec.hidden_size}, size, own.linear_bias),
    )


def _recurrent(spec: ModelSpec) -> RecurrentSpec:
    if spec.recurrent is None:
        raise ValueError("a layer is recurrent, but the spec has no RecurrentSpec")
    return spec.recurrent


def _recurrent_layout(
    spec: ModelSpec, own: RecurrentSpec, prefix: str, rows: dict[str, int], norm_size: int
) -> RecurrentLayout:
    channels = own.conv_channels
    return RecurrentLayout(
        inputs=_matrix(prefix, rows, spec.hidden_size, own.linear_bias),
        conv=TensorSpec(f"{prefix}conv1d.weight", (channels, 1, own.conv_width)),
        conv_bias=TensorSpec(f"{prefix}conv1d.bias", (channels,)) if own.conv_bias else None,
        decay=TensorSpec(f"{prefix}A_log", (own.heads,)),
        time_bias=TensorSpec(f"{prefix}dt_bias", (own.heads,)),
        skip=None,
        gate_norm=TensorSpec(f"{prefix}norm.weight", (norm_size,)),
        out=_matrix(prefix, {"out_proj": spec.hidden_size}, own.value_size, own.linear_bias),
    )


MIXER_LAYOUTS: Mapping[MixerKind, Callable[[ModelSpec, str], MixerLayout]] = {
    "attention": _attention,
    "gated_attention": _gated_attention,
    "latent_attention": _latent_attention,
    "gated_delta": _gated_delta,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
}
"""The tensors of each kind of mixer in the layer with this prefix."""


def _matrix(prefix: str, rows: dict[str, int], columns: int, has_bias: bool = False) -> Matrix:
    parts = tuple(TensorSpec(f"{prefix}{name}.weight", (count, columns)) for name, count in rows.items())
    biases = tuple(TensorSpec(f"{prefix}{name}.bias", (count,)) for name, count in rows.items())
    return Matrix(parts, biases if has_bias else ())


def _mlp(spec: ModelSpec, names: WeightNames, prefix: str) -> tuple[Matrix, Matrix]:
    gate_up, inner = names.mlp_gate_up, spec.inner_size
    up = {gate_up[0]: 2 * inner} if len(gate_up) == 1 else dict.fromkeys(gate_up, inner)
    up = up if spec.gated_mlp else {gate_up[-1]: inner}
    down = {names.mlp_down: spec.hidden_size}
    return (
        _matrix(prefix, up, spec.hidden_size, spec.mlp_bias),
        _matrix(prefix, down, spec.inner_size, spec.mlp_bias),
    )


def _moe(spec: ModelSpec, names: WeightNames, prefix: str) -> MoeLayout:
    if spec.moe is None:
        raise ValueError("a layer has experts, but the spec has no MoeSpec")
    inner, hidden, biased = spec.moe.inner_size, spec.hidden_size, spec.moe.has_bias
    experts = []
    for expert in range(spec.moe.num_experts):
        gate, up, down = (name.format(e=expert) for name in (names.expert_gate, names.expert_up, names.expert_down))
        gate_up = _matrix(prefix, {gate: inner, up: inner}, hidden, biased)
        experts.append((gate_up, _matrix(prefix, {down: hidden}, inner, biased)))
    router = _matrix(prefix, {names.router: spec.moe.num_experts}, hidden, biased)
    bias = None
    if spec.moe.routing.scores == "sigmoid":
        bias = TensorSpec(prefix + names.router_bias, (spec.moe.num_experts,))
    if not spec.moe.shared_size:
        return MoeLayout(router, tuple(experts), router_bias=bias)
    shared, size, halves = f"{prefix}{names.shared_expert}.", spec.moe.shared_size, names.shared_gate_up
    wide = {halves[0]: 2 * size} if len(halves) == 1 else dict.fromkeys(halves, size)
    return MoeLayout(
        router,
        tuple(experts),
        (
            _matrix(shared, wide, hidden),
            _matrix(shared, {names.shared_down: hidden}, size),
        ),
        _matrix(prefix, {f"{names.shared_expert}_gate": 1}, hidden) if spec.moe.gates_shared else None,
        bias,
    )


# --- iterating over a layout ---


def matrices_of(layer: LayerLayout) -> Iterator[Matrix]:
    yield from layer.mixer.matrices()
    if isinstance(layer.mlp, MoeLayout):
        yield layer.mlp.router
        for pair in (*layer.mlp.experts, layer.mlp.shared or ()):
            yield from pair
        if layer.mlp.shared_gate is not None:
            yield layer.mlp.shared_gate
    else:
        yield from layer.mlp or ()


def norms_of(layer: LayerLayout) -> Iterator[TensorSpec]:
    """Norms, and what else is kept in float32."""
    yield from layer.mixer.norms()
    for norm in (layer.input_norm, layer.mixer_out_norm, layer.mlp_norm, layer.mlp_out_norm):
        yield from norm or ()
    if isinstance(layer.mlp, MoeLayout) and layer.mlp.router_bias is not None:
        yield layer.mlp.router_bias


def all_tensors(layout: ModelLayout) -> Iterator[TensorSpec]:
    """Every tensor that the model needs."""
    yield layout.embedding
    for layer in layout.layers:
        yield from norms_of(layer)
        yield from layer.mixer.reshaped()
        for matrix in matrices_of(layer):
            yield from matrix.all_tensors()
    yield from layout.final_norm
    if layout.head is not None:
        yield from layout.head.all_tensors()
