"""GGUF metadata becomes the config that transformers would have written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import write_gguf

from millrace.errors import ModelError
from millrace.sources.gguf.config import config_from_gguf
from millrace.sources.gguf.model import open_gguf_model

BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 500000.0,
}


def config_of(tmp_path: Path, arch: str, tensors: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`changes` are metadata with dots written as two underscores; None removes a key."""
    metadata = {f"{arch}.{key}": value for key, value in BASE.items()}
    for key, value in changes.items():
        dotted = key.replace("__", ".")
        metadata[dotted if dotted.startswith("tokenizer") else f"{arch}.{dotted}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    arrays = {"token_embd.weight": np.zeros((100, 64), dtype=np.float32), **(tensors or {})}
    path = write_gguf(tmp_path / f"{arch}.gguf", metadata, arrays, arch)
    return config_from_gguf(open_gguf_model(path))


def holds(config: dict[str, Any], **expected: Any) -> bool:
    return {key: config.get(key) for key in expected} == expected


def test_llama(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", tokenizer__ggml__eos_token_id=2, tokenizer__ggml__bos_token_id=1)
    assert holds(
        config,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        rope_scaling=None,
        vocab_size=100,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        bos_token_id=1,
        eos_token_id=2,
    )


def test_biases_and_lm_head_follow_from_the_tensors(tmp_path: Path) -> None:
    zeros = np.zeros(64, dtype=np.float32)
    tensors = {"output.weight": np.zeros((100, 64), dtype=np.float32), "blk.0.attn_q.bias": zeros}
    config = config_of(tmp_path, "llama", tensors | {"blk.0.ffn_gate.bias": zeros})
    assert holds(config, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)


def test_all_end_tokens_are_kept(tmp_path: Path) -> None:
    ends = {"tokenizer__ggml__eos_token_id": 5, "tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 5}
    assert config_of(tmp_path, "llama", **ends)["eos_token_id"] == [5, 7]


def test_mistral_and_mixtral_use_the_llama_architecture(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", attention__sliding_window=512)
    assert holds(config, model_type="mistral", sliding_window=512, architectures=["MistralForCausalLM"])
    config = config_of(tmp_path, "llama", expert_count=8, expert_used_count=2)
    assert holds(config, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None)


def test_qwen(tmp_path: Path) -> None:
    assert holds(config_of(tmp_path, "qwen2"), model_type="qwen2", use_sliding_window=False, intermediate_size=128)
    config = config_of(tmp_path, "qwen3", attention__key_length=32, attention__value_length=32)
    assert holds(config, model_type="qwen3", head_dim=32, attention_bias=False)
    config = config_of(
        tmp_path, "qwen3moe", expert_count=16, expert_used_count=4, expert_feed_forward_length=24, head_dim=None
    )
    assert holds(
        config,
        model_type="qwen3_moe",
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )


def test_gemma2(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = config_of(tmp_path, "gemma2", block_count=4, attention__sliding_window=1024, **caps)
    assert holds(
        config,
        model_type="gemma2",
        sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
        hidden_activation="gelu_pytorch_tanh",
        **caps,
    )
    assert config_of(tmp_path, "gemma2", block_count=46, attention__key_length=32)["query_pre_attn_scalar"] == 16
    assert config_of(tmp_path, "gemma2", block_count=42, attention__key_length=32)["query_pre_attn_scalar"] == 32


def test_gemma3(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3", block_count=7, attention__sliding_window=512, rope__freq_base=1e6)
    assert holds(
        config,
        model_type="gemma3_text",
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    scaled = config_of(tmp_path, "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert scaled["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert scaled["layer_types"] == ["full_attention"] * 2, "without a window nothing slides"
    given = config_of(
        tmp_path,
        "gemma3",
        attention__sliding_window=512,
        attention__sliding_window_pattern=[False, True],
        rope__freq_base_swa=7000.0,
    )
    assert holds(given, layer_types=["full_attention", "sliding_attention"], rope_local_base_freq=7000.0)


def test_smollm3_leaves_every_fourth_layer_unrotated(tmp_path: Path) -> None:
    config = config_of(tmp_path, "smollm3", block_count=8)
    assert holds(config, model_type="smollm3", no_rope_layers=[1, 1, 1, 0] * 2)


def test_list_of_equal_values_per_layer_is_one_value(tmp_path: Path) -> None:
    assert config_of(tmp_path, "llama", attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    with pytest.raises(ModelError, match="differs between layers"):
        config_of(tmp_path, "llama", attention__head_count_kv=[2, 1])


# --- rope scaling ---


def test_linear_and_yarn(tmp_path: Path) -> None:
    assert config_of(tmp_path, "llama", rope__scaling__type="none")["rope_scaling"] is None
    assert config_of(tmp_path, "llama", rope__scaling__factor=4.0)["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 1024}
    assert config_of(tmp_path, "qwen2", **yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    more = {"rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_attn_factor": 0.75}
    scaling = config_of(tmp_path, "qwen2", **yarn, **more)["rope_scaling"]
    assert scaling["beta_fast"] == 16.0
    assert scaling["attention_factor"] == 0.75
    level = config_of(tmp_path, "llama", **yarn, rope__scaling__yarn_log_multiplier=1.0)["rope_scaling"]
    assert level["attention_factor"] == pytest.approx(1.0)


def test_yarn_variants_and_unknown_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope.scaling.type.*longrope"):
        config_of(tmp_path, "llama", rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="yarn_ext_factor"):
        config_of(
            tmp_path, "llama", rope__scaling__type="yarn", rope__scaling__factor=2.0, rope__scaling__yarn_ext_factor=0.5
        )


def divisors(theta: float, head_dim: int, factor: float, low: float, high: float, context: int) -> Any:
    """Reference: long wavelengths are divided by `factor`, short ones are kept, and others are interpolated."""
    found = []
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (index / head_dim)
        if wave < context / high:
            found.append(1.0)
        elif wave > context / low:
            found.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            found.append(1.0 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize(
    ("factor", "low", "high", "context", "head_dim"),
    [(8.0, 1.0, 4.0, 8192, 128), (32.0, 1.0, 4.0, 8192, 64), (16.0, 2.0, 6.0, 4096, 128), (4.0, 1.0, 4.0, 32768, 96)],
)
def test_llama3_scaling_is_recovered_from_its_table(
    tmp_path: Path, factor: float, low: float, high: float, context: int, head_dim: int
) -> None:
    table = divisors(500000.0, head_dim, factor, low, high, context)
    size = {"attention__key_length": head_dim, "attention__value_length": head_dim}
    rule = config_of(tmp_path, "llama", {"rope_freqs.weight": table}, **size)["rope_scaling"]
    assert rule["rope_type"] == "llama3"
    again = divisors(
        500000.0,
        head_dim,
        rule["factor"],
        rule["low_freq_factor"],
        rule["high_freq_factor"],
        rule["original_max_position_embeddings"],
    )
    np.testing.assert_allclose(again, table, rtol=1e-4)
    if (low, high, context) == (1.0, 4.0, 8192):
        assert rule["original_max_position_embeddings"] == 8192
        assert rule["low_freq_factor"] == 1.0


def test_other_tables_of_divisors(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    assert config_of(tmp_path, "llama", {"rope_freqs.weight": ones})["rope_scaling"] is None
    for table in (np.linspace(5, 1, 8, dtype=np.float32), np.ones(9, dtype=np.float32), np.full(8, np.nan, np.float32)):
        with pytest.raises(ModelError, match="rope_freqs.weight"):
            config_of(tmp_path, "llama", {"rope_freqs.weight": table})


# --- refused files ---


def test_unknown_architectures_are_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'gptneox', which is not supported.*llama.*gemma3"):
        config_of(tmp_path, "gptneox")


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length"])
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=f"'llama.{key}' is missing"):
        config_of(tmp_path, "llama", **{key.replace(".", "__"): None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 2**31),
        ("block_count", 5000),
        ("block_count", "3"),
        ("attention__head_count", 128),
        ("attention__layer_norm_rms_epsilon", float("nan")),
        ("attention__value_length", 8),
        ("rope__dimension_count", 8),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("expert_shared_count", 1),
    ],
)
def test_invalid_and_unsupported_values_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key.replace("__", ".")):
        config_of(tmp_path, "llama", **{key: value})


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("olmo2", {"attention__sliding_window": 64}, "OLMo 3"),
        ("glm4", {"rope__dimension_count": 16}, "heads of 16 rotate 8 dimensions"),
        ("glm4", {"nextn_predict_layers": 1}, "predict several tokens"),
        ("glm4", {"rope__dimension_sections": [2, 3, 3, 0]}, "for images"),
        ("deepseek2", {"rope__dimension_count": 8, "attention__temperature_scale": 0.5}, "temperature_scale"),
        ("deepseek2", {"rope__dimension_count": 8}, "expert_used_count' is missing"),
        ("gpt-oss", {}, "sliding_window' is missing"),
    ],
)
def test_relatives_that_are_not_supported_are_refused(
    tmp_path: Path, arch: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, arch, **changes)


def test_file_without_embedding_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "x.gguf", {f"llama.{key}": value for key, value in BASE.items()}, {"x": np.zeros(4, np.float32)}
    )
    with pytest.raises(ModelError, match=r"token_embd.weight"):
        config_from_gguf(open_gguf_model(path))
