"""The KV dtype resolved at start determines the size of the pool, its name and the fingerprint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from millrace.config import load_config
from millrace.engine.build import build_engine
from millrace.errors import ConfigError
from millrace.link.channel import InProcessLink
from millrace.link.messages import EngineReady

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def ready_with(directory: Path, **settings: object) -> EngineReady:
    source = directory / "config.json"
    source.write_text(json.dumps(TINY), encoding="utf-8")
    chosen = {"model.source": f"random:{source}", "model.dtype": "bfloat16", "memory.kv_tokens": 512}
    chosen |= {"run.device": "cpu", "run.threads": 1, "plan.max_running": 4}
    config = load_config(None, {**chosen, **{key.replace("__", "."): value for key, value in settings.items()}}).config
    threads = torch.get_num_threads()
    engine, ready = build_engine(config, InProcessLink())
    # An engine closes its device at the end of `run`, and this one does not run.
    engine.device.close()
    torch.set_num_threads(threads)
    return ready


def test_auto_equals_the_dtype_it_resolves_to(tmp_path: Path) -> None:
    auto, full = (ready_with(tmp_path, memory__kv_dtype=kind) for kind in ("auto", "full"))
    assert auto.memory_plan.keys() == full.memory_plan.keys()
    assert auto.memory_plan["KV pool, 512 tokens"] == 512 * 2 * 2 * 64 * 2
    assert auto.fingerprint == full.fingerprint


def test_another_dtype_is_named_and_changes_the_fingerprint(tmp_path: Path) -> None:
    full, narrow = (ready_with(tmp_path, memory__kv_dtype=kind) for kind in ("full", "int8"))
    assert narrow.memory_plan["KV pool, 512 tokens, int8"] == 512 * 2 * 2 * 68
    assert narrow.fingerprint != full.fingerprint


def test_an_unsupported_dtype_is_rejected_before_loading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory.kv_dtype is packed, which is for a GPU"):
        ready_with(tmp_path, memory__kv_dtype="packed")


def test_float16_halves_the_pool_of_a_float32_model_and_is_refused_for_others(tmp_path: Path) -> None:
    half = ready_with(tmp_path, memory__kv_dtype="float16", model__dtype="float32")
    assert half.memory_plan["KV pool, 512 tokens, float16"] == 512 * 2 * 2 * 64 * 2
    with pytest.raises(ConfigError, match="memory.kv_dtype is float16, which is for float32 models"):
        ready_with(tmp_path, memory__kv_dtype="float16")
