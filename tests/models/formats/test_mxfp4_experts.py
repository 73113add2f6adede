"""gpt-oss's stacked experts: the reader gives each expert the weights that transformers gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from helpers.tiny_models import config_of, make_reference
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from millrace.errors import ModelError
from millrace.models.formats.read import format_of
from millrace.models.load import load_decoder
from millrace.models.weights.safetensors_weights import SafetensorsWeights
from millrace.sources.resolve import resolve_model

EXPERTS, HIDDEN, INNER = 3, 64, 32
PREFIX = "model.layers.0.mlp.experts"
CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def written(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{PREFIX}.{name}_blocks"] = blocks
        tensors[f"{PREFIX}.{name}_scales"] = torch.randint(110, 130, blocks.shape[:3], dtype=torch.uint8)
        tensors[f"{PREFIX}.{name}_bias"] = torch.randn(EXPERTS, rows)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def opened(folder: Path, config: dict[str, Any] | None = None) -> SafetensorsWeights:
    return SafetensorsWeights(folder, (folder / "model.safetensors",), config or CONFIG)


def own_rows(stacked: torch.Tensor, own: str, expert: int) -> torch.Tensor:
    """Gate rows alternate with up rows."""
    return stacked[expert] if own == "down_proj" else stacked[expert][own == "up_proj" :: 2]


def test_weights_equal_those_of_transformers(tmp_path: Path) -> None:
    tensors, source = written(tmp_path), opened(tmp_path)
    kind = format_of(CONFIG, source)
    assert kind is not None
    for own, shape in SHAPES.items():
        stacked = "down_proj" if own == "down_proj" else "gate_up_proj"
        parts = (tensors[f"{PREFIX}.{stacked}_{end}"] for end in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(*(part.clone() for part in parts), dtype=torch.float32).mT
        for expert in range(EXPERTS):
            matrix = kind.matrix(f"{PREFIX}.{expert}.{own}", shape)
            assert matrix is not None
            weight = matrix.read(torch.float32)
            assert torch.equal(weight.dequantised(), own_rows(theirs, own, expert))
            assert weight.num_bytes == matrix.num_bytes == sum(source.stored_bytes(name) for name in matrix.tensors)
            bias = source.get(f"{PREFIX}.{expert}.{own}.bias")
            assert torch.equal(bias, own_rows(tensors[f"{PREFIX}.{stacked}_bias"], own, expert))


def test_plain_experts_are_split_alike(tmp_path: Path) -> None:
    torch.manual_seed(1)
    gate_up, down = torch.randn(EXPERTS, HIDDEN, 2 * INNER), torch.randn(EXPERTS, INNER, HIDDEN)
    save_file({f"{PREFIX}.gate_up_proj": gate_up, f"{PREFIX}.down_proj": down}, tmp_path / "model.safetensors")
    source = opened(tmp_path, {**CONFIG, "quantization_config": None})
    for own, shape in SHAPES.items():
        found = source.get(f"{PREFIX}.1.{own}.weight")
        assert tuple(found.shape) == source.shape(f"{PREFIX}.1.{own}.weight") == shape
        assert torch.equal(found, own_rows((down if own == "down_proj" else gate_up).mT, own, 1))


def test_a_model_with_these_experts_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """Its own experts take the values that the stored ones stand for."""
    model = make_reference("gpt_oss", hidden_size=64, intermediate_size=32, num_local_experts=EXPERTS)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".experts." not in name}
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight, prefix = getattr(block.mlp.experts, name), f"model.layers.{layer}.mlp.experts.{name}"
            rows, columns = weight.shape[2], weight.shape[1]
            blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 125, blocks.shape[:3], dtype=torch.uint8)
            weight.data = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
            stored |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
            stored[f"{prefix}_bias"] = getattr(block.mlp.experts, f"{name}_bias").detach().clone()
    config = config_of(model) | {"quantization_config": CONFIG["quantization_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    save_file(stored, tmp_path / "model.safetensors")
    decoder = load_decoder(resolve_model(str(tmp_path)), device=torch.device("cpu"), dtype=torch.float32)
    tokens = list(range(3, 26))
    theirs = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(PagedDriver(decoder).run(0, tokens, 9), theirs, atol=2e-3, rtol=2e-3)


def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ModelError, match="_proj_b.* have shape"):
        opened(tmp_path, {**CONFIG, "hidden_size": 96})
    named = {"quant_method": "mxfp4", "modules_to_not_convert": [f"{PREFIX}.0"]}
    kind = format_of({"quantization_config": named}, opened(tmp_path))
    assert kind is not None
    with pytest.raises(ModelError, match="modules_to_not_convert names it"):
        kind.matrix(f"{PREFIX}.0.down_proj", SHAPES["down_proj"])
