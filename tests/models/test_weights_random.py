"""Random weights: the shapes of the config, the same values for the same seed, and quick to make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import ModelError
from millrace.models import kept_weights
from millrace.models.grouped import GroupedSource
from millrace.models.load import load_decoder, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import all_tensors, layout_of
from millrace.models.weight_sizes import spec_weight_bytes
from millrace.models.weights import WeightSource, open_weights, random_weights
from millrace.models.weights.random_formats import FORMATS
from millrace.sources.resolve import resolve_model

SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
UP = "model.layers.1.mlp.up_proj.weight"


def make(tmp_path: Path, seed: int = 0, **changes: Any) -> WeightSource:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    return open_weights(resolve_model(f"random:{path}"), seed=seed)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "mixtral", "qwen3_moe"]
)
def test_names_and_shapes_match_the_decoder(tmp_path: Path, kind: str) -> None:
    config = {
        "model_type": kind,
        **SIZES,
        "head_dim": 64,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    weights = make(tmp_path, **config)
    layout = layout_of(spec_from_config(config))
    assert {name: weights.shape(name) for name in weights.names()} == {p.name: p.shape for p in all_tensors(layout)}
    for name in weights.names():
        assert tuple(weights.get(name).shape) == weights.shape(name)
        assert weights.file_of(name) == tmp_path / "shape.json"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("std", [0.02, 0.005])
def test_values_are_finite_centred_and_of_the_right_size(tmp_path: Path, dtype: torch.dtype, std: float) -> None:
    values = make(tmp_path, initializer_range=std).get(UP, dtype=dtype)
    assert values.dtype == dtype
    floats = values.double()
    assert torch.isfinite(floats).all()
    assert floats.abs().mean() > 0
    assert abs(floats.mean()) < 3 * std / values.numel() ** 0.5
    assert 0.7 * std < floats.std() < 1.45 * std
    assert values.unique().numel() > 100


def test_a_tensor_depends_on_seed_and_name_only(tmp_path: Path) -> None:
    first = make(tmp_path, seed=1)
    everything = [first.get(name) for name in first.names()]
    assert everything
    again = make(tmp_path, seed=1).get(UP)
    assert torch.equal(first.get(UP), again)
    assert not torch.equal(make(tmp_path, seed=2).get(UP), again)
    assert not torch.equal(first.get("model.layers.0.mlp.up_proj.weight"), again)


def test_norms_leave_values_as_they_are(tmp_path: Path) -> None:
    assert torch.all(make(tmp_path).get("model.norm.weight") == 1.0)
    gemma = make(tmp_path, model_type="gemma3_text", head_dim=64)
    assert torch.all(gemma.get("model.layers.0.self_attn.q_norm.weight") == 0.0)


def test_the_configs_type_is_the_stored_type(tmp_path: Path) -> None:
    assert make(tmp_path).get(UP).dtype == torch.float32
    assert make(tmp_path, torch_dtype="bfloat16").get(UP).dtype == torch.bfloat16
    assert make(tmp_path, dtype="float16").get(UP).dtype == torch.float16


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shape.json describes no tensor lm.weight"):
        make(tmp_path).get("lm.weight")


def test_a_config_of_no_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gptj"):
        make(tmp_path, model_type="gptj")


def test_weights_do_not_depend_on_the_chunks_they_are_made_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make(tmp_path)
    whole = weights.get(UP, dtype=torch.bfloat16)
    monkeypatch.setattr(random_weights, "CHUNK_ITEMS", 1000)  # Otherwise only tensors of many MB have several.
    assert torch.equal(weights.get(UP, dtype=torch.bfloat16), whole)
    assert len(whole.unique()) > 100


@pytest.mark.parametrize("kind", FORMATS)
def test_every_quantised_format(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shapes and finite values as with plain weights, and a decoder of the size that was predicted."""
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    weights, plain = make(tmp_path, weight_format=kind), make(tmp_path)
    assert set(weights.names()) == set(plain.names())
    if isinstance(weights, GroupedSource):
        assert torch.isfinite(weights.get(UP)).all()
        assert weights.get(UP).shape == plain.shape(UP)
    make(tmp_path, weight_format=kind)
    files, cpu = resolve_model(f"random:{tmp_path / 'shape.json'}"), torch.device("cpu")
    decoder = load_decoder(files, device=cpu, dtype=torch.bfloat16)
    assert decoder.num_bytes == weight_bytes(files, torch.bfloat16, device=cpu)
    assert decoder.num_bytes < 0.9 * spec_weight_bytes(decoder.spec, torch.bfloat16)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="weight_format is 'q9'.*Q4_K"):
        make(tmp_path, weight_format="q9")
