"""ModelSpec: everything in which decoders differ. Plain data; no weights, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from millrace.models.spec.kv_groups import LayerGroups, group_by_window, one_group
from millrace.ops.base.activation_kind import Activation, ClampedSwiglu
from millrace.ops.base.routing import PLAIN_ROUTING, Routing

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]
MixerKind = Literal["attention", "gated_attention", "latent_attention", "gated_delta", "mamba2", "short_conv"]
"""How a layer mixes the tokens of a row; see `models/mixers`."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One set of rotary frequencies. Fields that belong to another `kind` are ignored."""

    rotary_dim: int
    """Number of leading dimensions of a head that are rotated."""
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies the rotated queries and keys (YaRN)."""
    divisors: tuple[float, ...] = ()
    """Divisor of each frequency."""


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    top_k: int
    inner_size: int
    renormalise: bool
    """True if the weights of a token's chosen experts are scaled to sum to one."""
    shared_size: int = 0
    """Inner size of an MLP that every token takes beside its experts; 0 for none."""
    gates_shared: bool = False
    """True if a token's share of that MLP is the sigmoid of a product of its own."""
    has_bias: bool = False
    """Of the router and of both matrices of every expert."""
    clamp: ClampedSwiglu | None = None
    """The experts' activation, if it is not the model's."""
    routing: Routing = PLAIN_ROUTING


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention: a token's keys and values in all heads are linear in one vector, its latent. The cache holds
    the latent and one rotated key that all heads share; queries are mapped to latents instead of latents to keys."""

    rank: int
    """Size of a latent."""
    rope_dim: int
    key_dim: int
    """Size of a head's keys without the rotated part."""
    value_dim: int
    query_rank: int | None
    """Size of the vector that queries are computed from; None: the hidden states."""
    pairs_neighbours: bool
    """True if RoPE pairs x[2i] with x[2i + 1], not x[i] with x[i + r/2]."""
    norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.rank + self.rope_dim

    def projected(self, num_heads: int) -> tuple[int, int]:
        """Rows of the matrices that hidden states are multiplied with: for queries, and for the cache."""
        return self.query_rank or self.query_size(num_heads), self.width

    def query_size(self, num_heads: int) -> int:
        return num_heads * (self.key_dim + self.rope_dim)

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Of one layer, without its norms of hidden states."""
        value_size = num_heads * self.value_dim
        inputs = hidden_size * sum(self.projected(num_heads))
        queries = 0 if self.query_rank is None else self.query_rank * (self.query_size(num_heads) + 1)
        return inputs + queries + self.rank * (num_heads * self.key_dim + value_size + 1) + hidden_size * value_size


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The recurrent layers of a model: a causal convolution, then a matrix per head that takes in keys and values. Of
    short convolutions there is no more than the convolution: their heads are channels, of no keys and one value."""

    heads: int
    groups: int
    """Heads of queries and keys; the heads of a group share them."""
    key_dim: int
    value_dim: int
    conv_width: int
    """Inputs of the convolution, the token's own included."""
    norm_eps: float
    conv_bias: bool = False
    linear_bias: bool = False
    norm_by_group: bool = False
    """Of Mamba2: norms take the heads of each group together, not all heads."""
    by_group: bool = True
    """Of gated delta nets: the projection gives queries, keys, values and gates of one group after another."""
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    """Mamba2: time steps are limited to this range."""

    @property
    def key_size(self) -> int:
        return self.groups * self.key_dim

    @property
    def value_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    def num_projected(self, mixer: MixerKind) -> int:
        """Numbers that a layer computes of each hidden state."""
        return self.conv_channels + self.value_size + (2 if mixer == "gated_delta" else 1) * self.heads

    def num_parameters(self, hidden_size: int, mixer: MixerKind) -> int:
        """Of one layer, without its norms of hidden states."""
        rows = self.num_projected(mixer)
        matrices = hidden_size * (rows + self.value_size) + self.linear_bias * (rows + hidden_size)
        conv = self.conv_channels * (self.conv_width + self.conv_bias)
        if mixer == "short_conv":
            return matrices + conv
        heads, norm = (2, self.value_dim) if mixer == "gated_delta" else (3, self.value_size)
        return matrices + conv + heads * self.heads + norm

    def state_bytes(self, itemsize: int) -> int:
        """Of one layer's state after one token. The inputs of the convolution have the model's dtype."""
        before = self.conv_channels * (self.conv_width - 1)
        return before * itemsize + 4 * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None = None
    """A query at position p sees keys k with p - k < window; None: all keys before it."""
    rope: int | None = 0
    """Index into ModelSpec.ropes; None: no rotation."""
    is_moe: bool = False
    mixer: MixerKind = "attention"
    has_mlp: bool = True

    @property
    def is_recurrent(self) -> bool:
        """True if the layer has a state of fixed size in place of keys and values."""
        return self.mixer in ("gated_delta", "mamba2", "short_conv")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    """Intermediate size of the dense MLPs."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Context length of the model, prompt and output together."""
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    attention_scale: float
    norm_offset: float = 0.0
    """Added to stored norm weights (Gemma stores w for a weight of 1 + w)."""
    activation: Activation = "silu"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    hidden_scale: float = 1.0
    """Multiplies the hidden states after the final norm (Granite divides its logits)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_span: Literal["head", "projection"] = "head"
    """What a norm of queries, or of keys, takes together: each head, or all heads of the layer."""
    qk_norm_after_rope: bool = False
    attention_sinks: bool = False
    """True if each head of a layer has a score that takes its share of the softmax without a value."""
    rotates_neighbours: bool = False
    """RoPE pairs dimension 2i with 2i + 1; else i with the one half of the rotated dimensions further."""
    norm_kind: Literal["rms", "layer"] = "rms"
    """Layer norms subtract the mean before they scale."""
    norm_weight: bool = True
    """False: norms of hidden states scale nothing (OLMo 1)."""
    norm_bias: bool = False
    """Of layer norms of hidden states."""
    parallel_mlp: bool = False
    """True if MLPs read the residual that attention reads, not the one after it."""
    one_norm: bool = False
    """True if attention and a parallel MLP have their norm in common."""
    gated_mlp: bool = True
    """False: the activation of one projection, without a second one that it is multiplied with."""
    qkv_by_group: bool = False
    """True if one tensor has, for each KV head, its queries, its key and its value."""
    qkv_clip: float | None = None
    """Queries, keys and values are limited to this size before they are rotated."""
    head_bias: bool = False
    input_norms: bool = True
    """False if attention and MLPs read the residual as it is; then their outputs are normalised (`sandwich_norms`)."""
    sandwich_norms: bool = False
    """True if attention and MLP outputs are normalised before they are added to the residual."""
    tied_head: bool = False
    moe: MoeSpec | None = None
    recurrent: RecurrentSpec | None = None
    """None: no layer has a recurrent state."""
    latent: LatentSpec | None = None
    """If set, all layers have latent attention, which is that of one KV head whose value is the beginning of its key:
    `num_kv_heads` is 1, and `head_dim` the numbers that the cache holds of a token."""
    has_kv_groups: bool = True
    """True if layers with different windows have block tables of their own, so that blocks behind a window can be
    freed."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Weights of the norms of queries and of keys, if there are such norms."""
        return (self.head_dim, self.head_dim) if self.qk_norm_span == "head" else (self.q_size, self.kv_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of first use."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers if not layer.is_recurrent))

    @property
    def num_recurrent(self) -> int:
        """Layers with a recurrent state in place of keys and values."""
        return sum(layer.is_recurrent for layer in self.layers)

    @property
    def num_attention(self) -> int:
        return self.num_layers - self.num_recurrent

    def state_bytes(self, itemsize: int) -> int:
        """Of all layers' states of one row after one token; 0 without recurrent layers."""
        return 0 if self.recurrent is None else self.num_recurrent * self.recurrent.state_bytes(itemsize)

    @property
    def kv_groups(self) -> LayerGroups:
        """Of the layers with keys and values. The place of a recurrent layer is (-1, its number among those)."""
        windows = [layer.window for layer in self.layers if not layer.is_recurrent]
        groups = group_by_window(windows) if self.has_kv_groups else one_group(len(windows))
        if not self.num_recurrent:
            return groups
        states, blocks = ((-1, index) for index in range(self.num_recurrent)), iter(groups.places)
        return replace(groups, places=tuple(next(states if layer.is_recurrent else blocks) for layer in self.layers))

    @property
    def rotates_whole_heads(self) -> bool:
        """True if every layer rotates all dimensions of a head, or none."""
        return all(layer.rope is None or self.ropes[layer.rope].rotary_dim == self.head_dim for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Number of layer weights that one token is multiplied with: of the experts, only the chosen ones."""
        chosen = 0 if self.moe is None else self.moe.inner_size * self.moe.top_k + self.moe.shared_size
        dense = self.inner_size * (2 + self.gated_mlp) / 3
        inner = sum(chosen if layer.is_moe else dense for layer in self.layers if layer.has_mlp)
        attention = self.num_attention * self._attention_parameters
        return attention + self._recurrent_parameters + round(3 * self.hidden_size * inner)

    @property
    def _attention_parameters(self) -> int:
        """Of the matrices of one layer."""
        if self.latent is not None:
            return self.latent.num_parameters(self.hidden_size, self.num_heads)
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + self._gate_size)

    @property
    def _recurrent_parameters(self) -> int:
        own = self.recurrent
        mixers = [layer.mixer for layer in self.layers if layer.is_recurrent]
        return 0 if own is None else sum(own.num_parameters(self.hidden_size, mixer) for mixer in mixers)

    @property
    def _gate_size(self) -> int:
        """Gates of a layer's attention, one for each number that it gives, if it has any."""
        return self.q_size if any(layer.mixer == "gated_attention" for layer in self.layers) else 0

    @property
    def num_parameters(self) -> int:
        """Number of all weights, embedding and norms included."""
        hidden, gates = self.hidden_size, self._gate_size
        per_norm = hidden * (self.norm_weight + self.norm_bias)
        branches = sum(1 + layer.has_mlp for layer in self.layers)
        each = self.input_norms + self.sandwich_norms
        norms = per_norm * (branches * each - self.num_layers * self.one_norm + 1)
        per_layer = self._attention_parameters + (sum(self.qk_norm_sizes) if self.qk_norm else 0)
        per_layer += (hidden if self.out_bias else 0) + (self.num_heads if self.attention_sinks else 0)
        inputs = self.q_size + 2 * self.kv_size + gates
        if self.latent is not None:
            inputs = sum(self.latent.projected(self.num_heads))
        per_layer += inputs if self.qkv_bias else 0
        halves = 1 + self.gated_mlp
        dense = (halves + 1) * hidden * self.inner_size
        dense += halves * self.inner_size + hidden if self.mlp_bias else 0
        sparse = 0 if self.moe is None else self.moe.num_experts * hidden * (3 * self.moe.inner_size + 1)
        sparse += 0 if self.moe is None else hidden * (3 * self.moe.shared_size + self.moe.gates_shared)
        if self.moe is not None and self.moe.has_bias:
            sparse += self.moe.num_experts * (2 * self.moe.inner_size + hidden + 1)
        sparse += self.moe.num_experts if self.moe is not None and self.moe.routing.scores == "sigmoid" else 0
        mlps = sum(sparse if layer.is_moe else dense for layer in self.layers if layer.has_mlp)
        embeddings = self.vocab_size * (hidden * (1 if self.tied_head else 2) + self.head_bias)
        return self.num_attention * per_layer + self._recurrent_parameters + norms + mlps + embeddings

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int]:
        """Shape of one KV tensor of the pool; index 0 is keys, 1 is values. Of latents there is one."""
        vectors = 2 if self.latent is None else 1
        return (vectors, num_blocks, self.num_kv_heads, block_size, self.head_dim)
