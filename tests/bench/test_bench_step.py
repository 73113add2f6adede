"""`millrace bench step`: time of a step by kind of work."""

from __future__ import annotations

import json

import pytest
import torch

from millrace.bench.micro.step import PRODUCTS, StepCase, measure_steps
from millrace.config import Config, ModelConfig, RunConfig
from millrace.errors import ConfigError
from millrace.models.native_stack import KINDS
from millrace.ops.cpp import native

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

pytestmark = pytest.mark.skipif(bool(native.native_missing(torch.device("cpu"))), reason="no native kernels here")


def config_of(tmp_path, **changes) -> Config:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return Config(model=ModelConfig(source=f"random:{path}"), run=RunConfig(device="cpu", threads=1))


def test_the_parts_sum_to_the_step(tmp_path) -> None:
    cases = (StepCase("decode", 2, 20, 1, 5), StepCase("prompt", 1, 0, 30, 3), StepCase("too long", 1, 100, 1, 3))
    costs = list(measure_steps(config_of(tmp_path, tie_word_embeddings=True), cases))
    assert [cost.case.name for cost in costs] == ["decode", "prompt"]
    for cost in costs:
        assert set(cost.kinds_ms) == set(KINDS) > set(PRODUCTS)
        assert all(ms > 0 for ms in cost.kinds_ms.values())
        assert cost.python_ms > 0
        assert 0 < cost.products_share < 1


def test_a_model_without_a_native_step_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="native step"):
        list(measure_steps(config_of(tmp_path, tie_word_embeddings=False)))
