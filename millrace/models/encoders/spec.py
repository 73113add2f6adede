"""An encoder described by its config: sizes, and in what its family differs from BERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millrace.errors import ModelError


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors below its own prefix, without `.weight` and `.bias`."""

    qkv: tuple[str, ...]
    """Three linears, or one that holds all three."""
    out: str
    attention_norm: str
    up: tuple[str, ...]
    """One linear, or the two of a gated MLP (gate, up); `joined` says if one tensor holds both."""
    down: str
    mlp_norm: str


@dataclass(frozen=True, slots=True)
class FamilyNames:
    words: str
    embedding_norm: str
    layer: str
    """With {} for the layer's number."""
    names: LayerNames
    positions: str = ""
    types: str = ""
    final_norm: str = ""
    relative_bias: str = ""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    eps: float
    activation: str
    names: FamilyNames
    position_offset: int = 0
    """Index of the first position in the position table."""
    is_gated: bool = False
    gate_is_last: bool = False
    """A joined MLP tensor holds the up rows before the gate rows."""
    is_pre_norm: bool = False
    """Norms stand before attention and MLP, as in ModernBERT, not after them."""
    thetas: tuple[float, ...] = ()
    """Base of the rotary angles of each layer; () for learned positions."""
    windows: tuple[int, ...] = ()
    """Of each layer: how far a token sees in each direction; 0 = everywhere. () = everywhere in all layers."""
    relative_buckets: int = 0
    """MPNet: buckets of relative positions, each with a bias per head; 0 for none."""
    has_alibi: bool = False
    """Scores fall with the distance of two tokens, in each head at its own rate."""
    embedding_size: int = 0
    """ELECTRA: width of the embeddings, which a linear layer brings to `hidden_size`; 0: as wide."""
    classifier_pooling: str = "cls"
    classifier_activation: str = "gelu"

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Of the layers and the embedding of words; norms and biases are left out."""
        mlp = (3 if self.is_gated else 2) * self.hidden_size * self.intermediate_size
        return self.vocab_size * self.hidden_size + self.num_layers * (4 * self.hidden_size**2 + mlp)


_BERT_LAYER = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_DISTILBERT_LAYER = LayerNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_MPNET_LAYER = LayerNames(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_MODERN_LAYER = LayerNames(
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
)
_NOMIC_LAYER = LayerNames(
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)
_GTE_LAYER = LayerNames(
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)
_SPLIT_LAYER = LayerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="post_mlp_layernorm",
)


def _bert_names() -> FamilyNames:
    return FamilyNames(
        words="embeddings.word_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="encoder.layer.{}",
        names=_BERT_LAYER,
        positions="embeddings.position_embeddings",
        types="embeddings.token_type_embeddings",
    )


def _rotary_names(layer: str, names: LayerNames, embedding_norm: str, has_types: bool) -> FamilyNames:
    types = "embeddings.token_type_embeddings" if has_types else ""
    return FamilyNames("embeddings.word_embeddings", embedding_norm, layer, names, types=types)


def encoder_spec(config: Mapping[str, Any], stored: frozenset[str]) -> EncoderSpec:
    """`stored`: the names of the model's tensors. Some families are stored in two ways."""
    family = str(config.get("model_type"))
    if family in ("bert", "roberta", "xlm-roberta", "camembert", "electra"):
        return _bert(config, family, stored)
    if family == "distilbert":
        return _distilbert(config)
    if family == "mpnet":
        return _mpnet(config)
    if family == "modernbert":
        return _modernbert(config)
    if family == "nomic_bert":
        return _nomic(config, stored)
    if family in ("new", "gte"):
        return _gte(config, stored)
    raise ModelError(f"config.json has the model_type {family!r}, which is no encoder that can be loaded.")


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "vocab_size": _first(config, "vocab_size"),
        "hidden_size": _first(config, "hidden_size", "n_embd", "dim"),
        "num_layers": _first(config, "num_hidden_layers", "n_layer", "n_layers"),
        "num_heads": _first(config, "num_attention_heads", "n_head", "n_heads"),
        "intermediate_size": _first(config, "intermediate_size", "n_inner", "hidden_dim"),
    }
    for name, value in found.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json has no {name}, or it is not a positive number: {value!r}.")
    if found["hidden_size"] % found["num_heads"]:
        raise ModelError(f"hidden_size {found['hidden_size']} is no multiple of {found['num_heads']} heads.")
    return found


def _bert(config: Mapping[str, Any], family: str, stored: frozenset[str]) -> EncoderSpec:
    kind = config.get("position_embedding_type") or "absolute"
    if kind == "alibi":
        return _jina(config, stored)
    if kind != "absolute":
        raise ModelError(f"config.json sets position_embedding_type {kind!r}; only 'absolute' and 'alibi' are known.")
    is_bert = family in ("bert", "electra")
    offset = 0 if is_bert else int(_first(config, "pad_token_id", default=1)) + 1
    return EncoderSpec(
        family=family,
        **_sizes(config),
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
        names=_bert_names(),
        position_offset=int(config.get("position_offset", offset)),
        embedding_size=int(config.get("embedding_size") or 0) if family == "electra" else 0,
    )


def _jina(config: Mapping[str, Any], stored: frozenset[str]) -> EncoderSpec:
    """jina-embeddings-v2: BERT with distances in place of positions and a gated MLP, which GGUF files hold in two."""
    kind = config.get("feed_forward_type")
    if kind not in ("geglu", "reglu") or any("layer_norm_q" in name for name in stored):
        raise ModelError("This jina model has another MLP or norms of queries and keys, which are not supported.")
    is_split = any("mlp.gate_layer" in name for name in stored)
    layer = replace(
        _BERT_LAYER,
        up=("mlp.gate_layer", "mlp.up_layer") if is_split else ("mlp.gated_layers",),
        down="mlp.wo",
        mlp_norm="mlp.layernorm",
    )
    return EncoderSpec(
        family="jina_bert",
        **_sizes(config),
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation="gelu" if kind == "geglu" else "relu",
        names=replace(_bert_names(), names=layer, positions=""),
        is_gated=True,
        has_alibi=True,
    )


def _distilbert(config: Mapping[str, Any]) -> EncoderSpec:
    names = FamilyNames(
        words="embeddings.word_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="transformer.layer.{}",
        names=_DISTILBERT_LAYER,
        positions="embeddings.position_embeddings",
    )
    activation = str(config.get("activation", "gelu"))
    return EncoderSpec("distilbert", **_sizes(config), eps=1e-12, activation=activation, names=names)


def _mpnet(config: Mapping[str, Any]) -> EncoderSpec:
    names = FamilyNames(
        words="embeddings.word_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="encoder.layer.{}",
        names=_MPNET_LAYER,
        positions="embeddings.position_embeddings",
        relative_bias="encoder.relative_attention_bias",
    )
    return EncoderSpec(
        family="mpnet",
        **_sizes(config),
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
        names=names,
        position_offset=2,
        relative_buckets=int(config.get("relative_attention_num_buckets", 32)),
    )


def _modernbert(config: Mapping[str, Any]) -> EncoderSpec:
    sizes = _sizes(config)
    every = int(config.get("global_attn_every_n_layers") or 3)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(sizes["num_layers"])
    ]
    thetas = {
        "full_attention": _theta(config, "full_attention", "global_rope_theta", 160_000.0),
        "sliding_attention": _theta(config, "sliding_attention", "local_rope_theta", 10_000.0),
    }
    reach = int(config.get("local_attention", 128)) // 2
    names = FamilyNames(
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layer="layers.{}",
        names=_MODERN_LAYER,
        final_norm="final_norm",
    )
    return EncoderSpec(
        family="modernbert",
        **sizes,
        eps=float(config.get("norm_eps", 1e-5)),
        activation=str(config.get("hidden_activation", "gelu")),
        names=names,
        is_gated=True,
        is_pre_norm=True,
        thetas=tuple(thetas[kind] for kind in kinds),
        windows=tuple(reach if kind == "sliding_attention" else 0 for kind in kinds),
        classifier_pooling=str(config.get("classifier_pooling", "cls")),
        classifier_activation=str(config.get("classifier_activation", "gelu")),
    )


def _nomic(config: Mapping[str, Any], stored: frozenset[str]) -> EncoderSpec:
    """As published (Wqkv, fc11), or as transformers saves it."""
    is_split = any("self_attn.q_proj" in name for name in stored)
    has_types = bool(config.get("type_vocab_size", 2))
    fraction = config.get("rotary_emb_fraction")
    if config.get("rotary_emb_interleaved") or (fraction is not None and fraction != 1.0) or config.get("prenorm"):
        raise ModelError(
            "This nomic_bert model has partial or interleaved rotary positions or norms before its layers."
        )
    if config.get("num_experts"):
        raise ModelError("This nomic_bert model has experts (nomic-embed-text-v2), which are not supported.")
    sizes = _sizes(config)
    names = (
        _rotary_names("layers.{}", _SPLIT_LAYER, "embeddings.LayerNorm", has_types)
        if is_split
        else _rotary_names("encoder.layers.{}", _NOMIC_LAYER, "emb_ln", has_types)
    )
    return EncoderSpec(
        family="nomic_bert",
        **sizes,
        eps=float(_first(config, "layer_norm_eps", "layer_norm_epsilon", default=1e-12)),
        activation="silu" if config.get("activation_function") == "swiglu" else str(config.get("hidden_act", "silu")),
        names=names,
        is_gated=True,
        thetas=(_theta(config, "", "rotary_emb_base", 1000.0),) * sizes["num_layers"],
    )


def _gte(config: Mapping[str, Any], stored: frozenset[str]) -> EncoderSpec:
    """As published (model_type `new`), or as transformers saves it."""
    is_split = any("self_attn.q_proj" in name for name in stored)
    has_types = bool(config.get("type_vocab_size", 0))
    if config.get("rope_scaling") or config.get("layer_norm_type", "layer_norm") != "layer_norm":
        raise ModelError("This gte model scales its rotary positions or has other norms, which is not supported.")
    sizes = _sizes(config)
    names = (
        _rotary_names("layers.{}", _SPLIT_LAYER, "embeddings.LayerNorm", has_types)
        if is_split
        else _rotary_names("encoder.layer.{}", _GTE_LAYER, "embeddings.LayerNorm", has_types)
    )
    return EncoderSpec(
        family="gte",
        **sizes,
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
        names=names,
        is_gated=True,
        gate_is_last=not is_split,
        thetas=(_theta(config, "", "rope_theta", 160_000.0),) * sizes["num_layers"],
    )


def _theta(config: Mapping[str, Any], kind: str, older: str, default: float) -> float:
    """The base of rotary angles: in `rope_parameters`, or under the name that older configs use."""
    rope = config.get("rope_parameters") or {}
    own = rope.get(kind) or {} if kind else rope
    if own.get("rope_type", "default") != "default":
        raise ModelError(f"config.json sets the rope_type {own['rope_type']!r}; encoders support 'default' only.")
    return float(own.get("rope_theta") or config.get(older) or default)


def _first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)
