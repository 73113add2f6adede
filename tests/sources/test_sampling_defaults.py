"""Recommended sampling comes from the model's files, else from the table of known models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import write_gguf

from millrace.errors import ModelError
from millrace.params.defaults import SamplingDefaults
from millrace.sources.resolve import ModelFiles
from millrace.sources.sampling_defaults import sampling_defaults


def directory(tmp_path: Path, name: str, generation_config: object = None) -> ModelFiles:
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    return ModelFiles(name, "safetensors", tmp_path, {"model_type": "llama"}, ())


def test_generation_config_wins_over_the_table(tmp_path: Path) -> None:
    files = directory(tmp_path, "Qwen/Qwen3-8B", {"temperature": 0.5, "top_k": 7, "eos_token_id": 1})
    assert sampling_defaults(files, "model") == SamplingDefaults(
        temperature=0.5, top_k=7, source="generation_config.json"
    )
    assert sampling_defaults(files, "neutral").fields() == {}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen3-8B-Q4_K_M", "unsloth/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf"])
def test_table_is_used_for_files_that_say_nothing(tmp_path: Path, name: str) -> None:
    found = sampling_defaults(directory(tmp_path, name, {"eos_token_id": 1}), "model")
    assert found == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, source="table of known models")


def test_unknown_model_is_neutral(tmp_path: Path) -> None:
    assert sampling_defaults(directory(tmp_path, "my-own-model"), "model").fields() == {}


def test_gguf_metadata(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        {"general.sampling.temp": 0.25, "general.sampling.top_k": 11},
        {"x": np.zeros(4, np.float32)},
    )
    found = sampling_defaults(ModelFiles("m", "gguf", path, {}, (path,)), "model")
    assert found == SamplingDefaults(temperature=0.25, top_k=11, source="GGUF metadata")


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": 2.5}, {"temperature": True}])
def test_impossible_values_name_the_file_and_the_way_out(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json.*--generation-defaults neutral"):
        sampling_defaults(directory(tmp_path, "m", bad), "model")


def test_request_wins_and_greedy_stays_plain() -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    assert defaults.fill({"top_p": 0.5, "seed": None}) == {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.1}
    assert defaults.fill({"temperature": 0.0, "max_tokens": 3}) == {"temperature": 0.0, "max_tokens": 3}
