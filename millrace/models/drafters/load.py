"""Loads a drafter from a directory: finds its format, checks it against the target and binds its weights to ops."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.config import Quantization
from millrace.errors import ModelError
from millrace.models.angles import Angles
from millrace.models.builder import DecoderBuilder
from millrace.models.decoder import Decoder
from millrace.models.drafters.checkpoint import DrafterTensors
from millrace.models.drafters.formats import FIRST_LAYER, find_kind, read_spec
from millrace.models.drafters.int8 import Int8Matrices
from millrace.models.drafters.native import native_drafter
from millrace.models.drafters.program import Drafter, EagleDrafter, EagleWeights, MedusaDrafter, TokenMap
from millrace.models.drafters.spec import DrafterKind, DrafterSpec
from millrace.models.spec.layout import AttentionLayout, Matrix, ModelLayout, TensorSpec, all_tensors, layout_of
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.rope import inverse_frequencies
from millrace.ops.linear.dense import Head
from millrace.ops.linear.stored import fits_int8, int8_bytes
from millrace.sources.hf_config import read_json_object
from millrace.sources.hf_files import DRAFTER_TORCH_FILES, find_weights

_EMBEDDING, _HEAD, _FC = "embed_tokens.weight", "lm_head.weight", "fc.weight"
_MAPS = ("d2t", "t2d", "token_map")
MakeBuilder = Callable[[ModelSpec, ModelLayout], DecoderBuilder]


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """A drafter's directory, read as far as its config and the names of its tensors."""

    folder: Path
    config: dict[str, Any]
    tensors: DrafterTensors
    spec: DrafterSpec


def open_drafter(folder: Path, target: ModelSpec) -> DrafterFiles:
    """Read what the drafter is, and check every tensor's shape. Reads no weights."""
    config, tensors = _opened(folder)
    spec = read_spec(folder, config, tensors, target)
    if spec.kind != "draft":
        _check_tensors(folder, spec, tensors)
    return DrafterFiles(folder, config, tensors, spec)


def kind_in(folder: Path) -> DrafterKind:
    """What kind of drafter the directory holds."""
    return find_kind(folder, *_opened(folder))[0]


def _opened(folder: Path) -> tuple[dict[str, Any], DrafterTensors]:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is no drafter: it has no config.json. Give a directory with a drafter's config and weights."
        )
    config = read_json_object(folder / "config.json")
    if config.get("quantization_config") or config.get("compression_config"):
        raise ModelError(f"{folder}: the drafter is quantised, which is not supported. Use the unquantised one.")
    files = (
        find_weights(folder) or tuple(folder / name for name in DRAFTER_TORCH_FILES if (folder / name).is_file())[:1]
    )
    if not files:
        raise ModelError(
            f"{folder} has no weights: no safetensors file and none of {', '.join(DRAFTER_TORCH_FILES)}. Download them"
            " too."
        )
    return config, DrafterTensors(files)


@torch.inference_mode()
def load_drafter(
    files: DrafterFiles, target: Decoder, *, deterministic: bool = False, quantization: Quantization = "none"
) -> Drafter:
    """Bind the drafter's weights to ops for the target's device and dtype; with `quantization` int8, matrices are held
    in 8 bits. A draft model is loaded by `models.load.load_decoder` instead."""
    spec = files.spec
    if spec.kind == "draft":
        raise ValueError("a draft model is a decoder: load it with load_decoder")

    def builder(own: ModelSpec, layout: ModelLayout) -> DecoderBuilder:
        stored = Int8Matrices(files.tensors) if quantization == "int8" else None
        kind: Quantization = "none" if stored is None else "int8"
        place = (target.device, target.dtype, deterministic)
        return DecoderBuilder(own, layout, files.tensors, stored, *place, quantization=kind, progress=None)

    return _medusa(files, target, builder) if spec.kind == "medusa" else _eagle(files, target, builder)


def drafter_bytes(files: DrafterFiles, dtype: torch.dtype, quantization: Quantization) -> int:
    """Bytes of weights that `load_drafter` will hold."""
    shapes = [files.tensors.shape(name) for name in files.tensors.names()]
    in_int8 = [quantization == "int8" and fits_int8(shape) for shape in shapes]
    return sum(
        int8_bytes(shape) if small else math.prod(shape) * dtype.itemsize
        for shape, small in zip(shapes, in_int8, strict=True)
    )


def token_map(spec: DrafterSpec, tensors: DrafterTensors) -> Tensor | None:
    """The target's token id of each draft id, int64; None if the vocabularies are the same."""
    if not spec.has_token_map:
        return None
    if "token_map" in tensors:
        ids = tensors.get("token_map", dtype=torch.int64)
    else:
        # `d2t` holds differences: token id minus draft id.
        ids = tensors.get("d2t", dtype=torch.int64) + torch.arange(spec.draft_vocab_size)
    wrong = ids[(ids < 0) | (ids >= spec.vocab_size)]
    if len(wrong):
        raise ModelError(
            f"The {spec.format} drafter's vocabulary map names token {int(wrong[0])}; the target has"
            f" {spec.vocab_size} tokens. It was trained for another model."
        )
    return ids


# --- the tensors of a drafter ---


def layers_layout(spec: DrafterSpec) -> ModelLayout:
    """The layout of the decoder layers. EAGLE-3's first layer projects the embedding and the hidden state, joined."""
    assert spec.decoder is not None
    layout = layout_of(spec.decoder)
    if spec.kind != "eagle3":
        return layout
    first, attention = layout.layers[0], layout.layers[0].mixer
    assert isinstance(attention, AttentionLayout)
    parts = tuple(TensorSpec(part.name, (part.shape[0], 2 * spec.hidden_size)) for part in attention.qkv.parts)
    mixer = replace(attention, qkv=replace(attention.qkv, parts=parts))
    return replace(layout, layers=(replace(first, mixer=mixer), *layout.layers[1:]))


def eagle_tensors(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an EAGLE or EAGLE-3 drafter, without its vocabulary maps."""
    hidden, layout = spec.hidden_size, layers_layout(spec)
    num_states = len(spec.target_layers)
    columns = num_states * spec.target_hidden_size if spec.kind == "eagle3" else 2 * hidden
    found = {part.name: part.shape for part in all_tensors(layout) if part.name.startswith("model.layers.")}
    if spec.kind == "eagle" and not spec.has_input_norm:
        del found[FIRST_LAYER + "input_layernorm.weight"]
    optional = {
        "fc.bias": (spec.fc_bias, (hidden,)),
        FIRST_LAYER + "hidden_norm.weight": (spec.kind == "eagle3", (hidden,)),
        "embedding_norm.weight": (spec.has_embedding_norm, (hidden,)),
        "input_norm.weight": (spec.norm_before_fc, (columns,)),
        "norm.weight": (spec.has_final_norm, (hidden,)),
        _EMBEDDING: (spec.has_own_embedding, (spec.vocab_size, hidden)),
        _HEAD: (spec.has_own_head, (spec.draft_vocab_size, hidden)),
    }
    norms = {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(num_states) if spec.norm_each_state}
    return {
        _FC: (hidden, columns),
        **found,
        **norms,
        **{name: shape for name, (is_needed, shape) in optional.items() if is_needed},
    }


def medusa_tensors(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    found: dict[str, tuple[int, ...]] = {}
    for head in range(spec.num_medusa_heads):
        for block in range(spec.num_medusa_blocks):
            found[f"heads.{head}.blocks.{block}.weight"] = (hidden, hidden)
            if spec.medusa_bias:
                found[f"heads.{head}.blocks.{block}.bias"] = (hidden,)
        if spec.has_own_head:
            found[f"heads.{head}.head.weight"] = (spec.draft_vocab_size, hidden)
    if spec.has_shared_head:
        found[_HEAD] = (spec.draft_vocab_size, hidden)
    return found


def _check_tensors(folder: Path, spec: DrafterSpec, tensors: DrafterTensors) -> None:
    needed = medusa_tensors(spec) if spec.kind == "medusa" else eagle_tensors(spec)
    for name, shape in needed.items():
        if name not in tensors:
            raise ModelError(f"{folder}: no tensor {name}, which the {spec.format} drafter needs. Download it again.")
        if tensors.shape(name) != shape:
            raise ModelError(
                f"{folder}: tensor {name} has shape {tensors.shape(name)}; config and target require {shape}. It was"
                " trained for another model, or config.json is not its own."
            )
    left = sorted(set(tensors.names()) - needed.keys() - set(_MAPS))
    if spec.kind == "medusa":
        left = [name for name in left if not re.fullmatch(r"lm_head\.weight|model\..*", name)]
    if left:
        raise ModelError(
            f"{folder}: tensor {left[0]} does not belong to a {spec.format} drafter, so its drafts would be wrong."
            " This variant cannot be loaded; choose another drafter."
        )


# --- binding them to ops ---


def _eagle(files: DrafterFiles, target: Decoder, make_builder: MakeBuilder) -> EagleDrafter:
    spec, tensors = files.spec, files.tensors
    assert spec.decoder is not None
    layout = layers_layout(spec)
    if spec.kind == "eagle" and not spec.has_input_norm:
        # The layer's field must be filled; EagleDrafter does not use it.
        first = replace(layout.layers[0], input_norm=layout.layers[0].mlp_norm)
        layout = replace(layout, layers=(first, *layout.layers[1:]))
    builder = make_builder(spec.decoder, layout)
    ops, needed = builder.ops(), eagle_tensors(spec)

    def norm(name: str) -> Tensor | None:
        return builder.norm(TensorSpec(name, needed[name])) if name in needed else None

    def matrix(name: str) -> Matrix:
        bias = name.replace(".weight", ".bias")
        biases = (TensorSpec(bias, needed[bias]),) if bias in needed else ()
        return Matrix((TensorSpec(name, needed[name]),), biases)

    head = _head(builder, matrix(_HEAD)) if spec.has_own_head else None
    names = ["input_norm.weight", *(f"fc_norm.{index}.weight" for index in range(len(spec.target_layers)))]
    weights = EagleWeights(
        embed=_embedding(spec, tensors, target),
        fc=builder.linear(matrix(_FC), "fc"),
        layers=tuple(
            builder.layer(ops, (0, index), layer, own)
            for index, (layer, own) in enumerate(zip(spec.decoder.layers, layout.layers, strict=True))
        ),
        head=head,
        logits=target.logits if head is None else head.wide,
        hidden_norm=norm(FIRST_LAYER + "hidden_norm.weight"),
        embedding_norm=norm("embedding_norm.weight"),
        fc_norms=tuple(found for name in names if (found := norm(name)) is not None),
        final_norm=norm("norm.weight"),
    )
    angles = Angles(spec.decoder.ropes, [inverse_frequencies(rope).to(target.device) for rope in spec.decoder.ropes])
    stack = native_drafter(spec, weights, angles, builder.choices, target)
    return EagleDrafter(spec, weights, ops, angles, _token_map(files, target), stack)


def _embedding(spec: DrafterSpec, tensors: DrafterTensors, target: Decoder) -> Any:
    """The drafter's embedding; the target's if it has none, or an equal one (as EAGLE checkpoints do)."""
    if not spec.has_own_embedding:
        return target.embed
    own, known = tensors.get(_EMBEDDING, device=target.device, dtype=target.dtype), target.embedding_matrix
    if known is not None and known.shape == own.shape and torch.equal(own, known) and target.embedding_scale == 1.0:
        return target.embed
    return lambda token_ids: torch.nn.functional.embedding(token_ids, own)


def _medusa(files: DrafterFiles, target: Decoder, make_builder: MakeBuilder) -> MedusaDrafter:
    spec, needed = files.spec, medusa_tensors(files.spec)
    builder = make_builder(target.spec, layout_of(target.spec))

    def matrix(name: str) -> Matrix:
        biases = (TensorSpec(f"{name}.bias", needed[f"{name}.bias"]),) if f"{name}.bias" in needed else ()
        return Matrix((TensorSpec(f"{name}.weight", needed[f"{name}.weight"]),), biases)

    heads, blocks = range(spec.num_medusa_heads), range(spec.num_medusa_blocks)
    own: list[Head] | None = None
    if spec.has_own_head:
        own = [_head(builder, matrix(f"heads.{index}.head")) for index in heads]
    elif spec.has_shared_head:
        own = [_head(builder, matrix("lm_head"))]
    return MedusaDrafter(
        spec,
        [
            [builder.linear(matrix(f"heads.{head}.blocks.{block}"), "medusa_block") for block in blocks]
            for head in heads
        ],
        own,
        target.logits,
        _token_map(files, target),
    )


def _head(builder: DecoderBuilder, matrix: Matrix) -> Head:
    head = builder.linear(matrix, "head", "linear")
    assert isinstance(head, Head)
    return head


def _token_map(files: DrafterFiles, target: Decoder) -> TokenMap:
    ids = token_map(files.spec, files.tensors)
    return TokenMap(None if ids is None else ids.to(target.device))
