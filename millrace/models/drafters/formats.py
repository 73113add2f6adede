"""From a drafter's config.json and the names and shapes of its tensors to a DrafterSpec.

Where config and tensors tell the same fact, the tensors decide: published configs are often copies of the target's.
What does not fit the target is refused with both sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.errors import ModelError
from millrace.models.drafters.checkpoint import DrafterTensors
from millrace.models.drafters.spec import DrafterKind, DrafterSpec
from millrace.models.spec.config_reader import ConfigReader
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import LayerSpec, ModelSpec

FIRST_LAYER = "model.layers.0."
_LAYER_INDEX = r"model\.layers\.(\d+)\."
_SUPPORTED = "EAGLE, EAGLE-3, Medusa, speculators (eagle, eagle3) and draft models"


def read_spec(folder: Path, config: Mapping[str, Any], tensors: DrafterTensors, target: ModelSpec) -> DrafterSpec:
    """The spec of a drafter for this target. Raises a ModelError that names what cannot be loaded."""
    kind, name = find_kind(folder, config, tensors)
    if kind == "medusa":
        return _medusa(folder, config, tensors, target, name)
    if kind == "draft":
        return _draft(folder, config, target, name)
    return _eagle(folder, config, tensors, target, kind, name)


def find_kind(folder: Path, config: Mapping[str, Any], tensors: DrafterTensors) -> tuple[DrafterKind, str]:
    """(kind, name of the format)."""
    own = config.get("speculators_model_type")
    if own is not None:
        if own not in ("eagle", "eagle3"):
            raise ModelError(
                f"{folder}: a speculators drafter of type {own!r} cannot be loaded. Supported: eagle, eagle3."
                " Choose another drafter of the model, or train one with `millrace train-drafter`."
            )
        return own, f"speculators {own}"
    if config.get("medusa_num_heads") is not None or config.get("model_type") == "medusa":
        return "medusa", "Medusa"
    if FIRST_LAYER + "hidden_norm.weight" in tensors:
        return "eagle3", "EAGLE-3"
    if "fc.weight" in tensors:
        return "eagle", "EAGLE"
    if "embed_tokens.weight" in tensors and tensors.count(_LAYER_INDEX):
        return "draft", "draft model"
    named = ", ".join(map(str, config.get("architectures") or [])) or f"model_type {config.get('model_type')!r}"
    raise ModelError(
        f"{folder} ({named}) is no drafter that can be loaded. Supported: {_SUPPORTED}. Choose another drafter of the"
        " model, or train one with `millrace train-drafter`."
    )


def _medusa(
    folder: Path, config: Mapping[str, Any], tensors: DrafterTensors, target: ModelSpec, name: str
) -> DrafterSpec:
    num_heads = tensors.count(r"heads\.(\d+)\.")
    num_blocks = tensors.count(r"heads\.0\.blocks\.(\d+)\.")
    if not num_heads or not num_blocks:
        raise _missing(folder, name, "heads.0.blocks.0.weight")
    hidden_size = tensors.shape("heads.0.blocks.0.weight")[0]
    _check_size(folder, name, "hidden size", hidden_size, target.hidden_size)
    has_own, has_shared = "heads.0.head.weight" in tensors, "lm_head.weight" in tensors
    head = "heads.0.head.weight" if has_own else "lm_head.weight"
    vocabulary = tensors.shape(head)[0] if has_own or has_shared else target.vocab_size
    return DrafterSpec(
        "medusa",
        name,
        hidden_size=hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=_draft_vocabulary(folder, name, vocabulary, tensors, target),
        num_medusa_heads=num_heads,
        num_medusa_blocks=num_blocks,
        medusa_bias="heads.0.blocks.0.bias" in tensors,
        has_own_head=has_own,
        has_shared_head=has_shared and not has_own,
    )


def _draft(folder: Path, config: Mapping[str, Any], target: ModelSpec, name: str) -> DrafterSpec:
    decoder = spec_from_config(config)
    _check_size(folder, name, "vocabulary", decoder.vocab_size, target.vocab_size)
    return DrafterSpec(
        "draft",
        name,
        hidden_size=decoder.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=decoder.vocab_size,
        decoder=decoder,
        has_own_embedding=True,
        has_own_head=True,
        has_final_norm=True,
    )


def _eagle(
    folder: Path,
    config: Mapping[str, Any],
    tensors: DrafterTensors,
    target: ModelSpec,
    kind: DrafterKind,
    name: str,
) -> DrafterSpec:
    if "fc.weight" not in tensors:
        raise _missing(folder, name, "fc.weight")
    c = ConfigReader(config)
    decoder = _layers(folder, config, tensors, target)
    spec = DrafterSpec(
        kind,
        name,
        hidden_size=decoder.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=_eagle_vocabulary(folder, name, config, tensors, target),
        decoder=decoder,
        has_own_embedding="embed_tokens.weight" in tensors,
        has_own_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
        has_embedding_norm="embedding_norm.weight" in tensors,
        has_input_norm=FIRST_LAYER + "input_layernorm.weight" in tensors,
        has_final_norm="norm.weight" in tensors,
        returns_normed=c.flag("norm_output"),
    )
    own = config.get("target_hidden_size")
    if own is not None:
        _check_size(folder, name, "target_hidden_size", int(own), target.hidden_size)
    if kind == "eagle" or not spec.has_own_embedding:
        _check_size(folder, name, "hidden size", spec.hidden_size, target.hidden_size)
    if kind == "eagle":
        return spec
    return replace(
        spec,
        target_layers=_target_layers(folder, config, tensors, target, name),
        norm_before_residual=c.flag("norm_before_residual"),
        norm_before_fc="input_norm.weight" in tensors,
        norm_each_state="fc_norm.0.weight" in tensors,
    )


def _layers(folder: Path, config: Mapping[str, Any], tensors: DrafterTensors, target: ModelSpec) -> ModelSpec:
    """The drafter's decoder layers: Llama layers, whatever family the target belongs to."""
    nested = config.get("transformer_layer_config")
    values = {**(nested if isinstance(nested, Mapping) else config)}
    kinds, window = values.pop("layer_types", None) or [], values.pop("sliding_window", None)
    values.update(architectures=[], model_type="llama", tie_word_embeddings=False)
    values.setdefault("max_position_embeddings", target.max_context)
    spec = spec_from_config(values)
    num_layers = tensors.count(_LAYER_INDEX)
    if not 1 <= num_layers <= spec.num_layers:
        raise ModelError(
            f"{folder}: config.json names {spec.num_layers} layers, the weights hold {num_layers}. Download both again."
        )
    layers = tuple(
        LayerSpec(window if kinds[index : index + 1] == ["sliding_attention"] else None) for index in range(num_layers)
    )
    attention = FIRST_LAYER + "self_attn."
    return replace(
        spec,
        layers=layers,
        has_kv_groups=False,
        max_context=max(spec.max_context, target.max_context),
        qkv_bias=attention + "q_proj.bias" in tensors,
        out_bias=attention + "o_proj.bias" in tensors,
        mlp_bias=FIRST_LAYER + "mlp.up_proj.bias" in tensors,
        qk_norm=attention + "q_norm.weight" in tensors,
    )


def _eagle_vocabulary(
    folder: Path, name: str, config: Mapping[str, Any], tensors: DrafterTensors, target: ModelSpec
) -> int:
    nested = config.get("transformer_layer_config")
    own = ConfigReader(nested if isinstance(nested, Mapping) else config).whole("vocab_size", target.vocab_size)
    if "embed_tokens.weight" in tensors:
        own = tensors.shape("embed_tokens.weight")[0]
    _check_size(folder, name, "vocabulary", own, target.vocab_size)
    size = tensors.shape("lm_head.weight")[0] if "lm_head.weight" in tensors else target.vocab_size
    return _draft_vocabulary(folder, name, size, tensors, target)


def _draft_vocabulary(folder: Path, name: str, size: int, tensors: DrafterTensors, target: ModelSpec) -> int:
    """The number of tokens that the drafter can propose: its head has this many rows."""
    if size == target.vocab_size:
        return size
    found = next((key for key in ("d2t", "token_map") if key in tensors), None)
    if found is None:
        raise ModelError(
            f"{folder}: the {name} drafter has a head of {size} tokens, the target a vocabulary of {target.vocab_size},"
            " and there is no map between them (d2t). It was trained for another model."
        )
    if tensors.shape(found) != (size,):
        raise ModelError(f"{folder}: {found} has shape {tensors.shape(found)}; the head has {size} tokens.")
    return size


def _target_layers(
    folder: Path, config: Mapping[str, Any], tensors: DrafterTensors, target: ModelSpec, name: str
) -> tuple[int, ...]:
    """EAGLE-3: which states of the target are fused; by default three, near the start, the middle and the end."""
    nested = config.get("eagle_config")
    reader = ConfigReader({**(nested if isinstance(nested, Mapping) else {}), **config})
    count = target.num_layers
    layers = reader.whole_list("eagle_aux_hidden_state_layer_ids") or [2, count // 2, count - 3]
    columns = tensors.shape("fc.weight")[1]
    if columns != len(layers) * target.hidden_size:
        raise ModelError(
            f"{folder}: the {name} drafter fuses {columns} numbers, the target gives {len(layers)} states of"
            f" {target.hidden_size}. It was trained for another model."
        )
    if not all(0 <= layer <= count for layer in layers):
        raise ModelError(f"{folder}: the {name} drafter reads layers {layers}; the target has {count} layers.")
    return tuple(layers)


def _check_size(folder: Path, name: str, what: str, own: int, target: int) -> None:
    if own != target:
        raise ModelError(
            f"{folder}: the {name} drafter has {what} {own}, the target {target}. It was trained for another model."
        )


def _missing(folder: Path, name: str, tensor: str) -> ModelError:
    return ModelError(f"{folder}: no tensor {tensor}, which a {name} drafter needs. Download the drafter again.")
