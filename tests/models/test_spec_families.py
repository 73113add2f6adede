"""From config.json to ModelSpec: old and new spellings, families' defaults, and refusals that name the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import CASES, config_of, make_reference

from millrace.errors import ModelError
from millrace.models.spec.families import FAMILIES, spec_from_config
from millrace.models.spec.layout import all_tensors, layout_of
from millrace.models.spec.model_spec import RopeSpec
from millrace.models.spec.rope import inverse_frequencies, read_rope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
GEMMA3_4B: dict[str, Any] = {
    # As published: most sizes are left to the family's defaults.
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def test_llama() -> None:
    spec = spec_from_config(LLAMA)
    assert (spec.family, spec.num_layers, spec.head_dim, spec.q_size, spec.kv_size) == ("llama", 2, 16, 64, 32)
    assert spec.ropes == (RopeSpec(rotary_dim=16, theta=5000.0),)
    assert spec.windows == (None,)
    assert not spec.tied_head
    assert spec.kv_shape(7, 16) == (2, 7, 2, 16, 16)


def test_published_gemma3_relies_on_defaults() -> None:
    spec = spec_from_config(GEMMA3_4B)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.tied_head
    assert spec.qk_norm
    assert spec.sandwich_norms
    assert [layer.window for layer in spec.layers[:6]] == [1024] * 5 + [None]
    assert [layer.rope for layer in spec.layers[:6]] == [1] * 5 + [0]
    assert spec.ropes[0] == RopeSpec(256, 1e6, "linear", factor=8.0)
    assert spec.ropes[1] == RopeSpec(256, 1e4)
    assert spec.embedding_scale == pytest.approx(2560**0.5)


def test_new_and_old_spelling_of_rope_mean_the_same() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = spec_from_config({**LLAMA, "rope_scaling": scaling})
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert spec_from_config({**new, "rope_parameters": {"rope_theta": 5000.0, **scaling}}) == old
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    assert spec_from_config({**LLAMA, "rope_scaling": older}) == old
    gemma = {key: value for key, value in GEMMA3_4B["text_config"].items() if key != "rope_scaling"}
    gemma["architectures"] = ["Gemma3ForCausalLM"]
    gemma["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert spec_from_config(gemma) == spec_from_config(GEMMA3_4B)


def test_sliding_windows_by_family() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 1}
    assert spec_from_config(qwen).windows == (None,)
    used = spec_from_config({**qwen, "use_sliding_window": True})
    assert [layer.window for layer in used.layers] == [None, 9]
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert spec_from_config(mistral).windows == (4096,)
    assert spec_from_config({**mistral, "sliding_window": None}).windows == (None,)


def test_yarn_extends_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert spec_from_config({**LLAMA, "rope_scaling": scaling}).max_context == 1024
    assert spec_from_config({**LLAMA, "max_position_embeddings": 2000, "rope_scaling": scaling}).max_context == 2000


@pytest.mark.parametrize("case", CASES)
def test_layout_names_exactly_what_a_checkpoint_holds(case: str, tmp_path: Path) -> None:
    """The names and shapes of a checkpoint as `transformers` writes it, read by the product's own reader."""
    from millrace.models.weights import open_weights
    from millrace.sources.resolve import resolve_model

    model = make_reference(case)
    model.save_pretrained(tmp_path)
    files = resolve_model(str(tmp_path))
    source = open_weights(files)
    needed = {part.name: part.shape for part in all_tensors(layout_of(spec_from_config(files.config)))}
    assert {name: source.shape(name) for name in source.names()} == needed
    assert spec_from_config(files.config) == spec_from_config(config_of(model))
    assert spec_from_config(files.config).num_parameters == sum(math.prod(shape) for shape in needed.values())


# --- rope frequencies ---


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("llama")])
def test_frequencies_are_bit_equal_to_transformers(case: str) -> None:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    theirs = model.model.rotary_emb
    assert torch.equal(inverse_frequencies(spec.ropes[0]), theirs.inv_freq)
    assert spec.ropes[0].attention_factor == pytest.approx(theirs.attention_scaling)


def test_divisors_divide() -> None:
    plain = inverse_frequencies(RopeSpec(4, 100.0))
    divided = inverse_frequencies(RopeSpec(4, 100.0, "divisors", divisors=(1.0, 8.0)))
    assert torch.equal(divided, plain / torch.tensor([1.0, 8.0]))


def test_divisors_from_a_config() -> None:
    scaling = {"rope_type": "divisors", "divisors": [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]}
    assert spec_from_config({**LLAMA, "rope_scaling": scaling}).ropes[0].divisors[3] == 4.0
    assert "divisors" in refused({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0]}})


def test_partial_rotation() -> None:
    assert read_rope({"partial_rotary_factor": 0.25, "max_position_embeddings": 8}, 64, 1e4).rotary_dim == 16


# --- refusals ---


def refused(changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> str:
    with pytest.raises(ModelError) as error:
        spec_from_config({**base, **changes})
    return str(error.value)


def test_unknown_architecture_lists_what_is_supported() -> None:
    text = refused({"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in text
    assert all(name in text for family in FAMILIES for name in family.architectures)
    assert "'t5'" in refused({"architectures": None, "model_type": "t5"})


def test_unknown_architecture_names_those_spelled_alike() -> None:
    text = refused({"architectures": ["Cohere3ForCausalLM"], "model_type": "cohere3"})
    assert (
        "Names like it: CohereForCausalLM, Cohere2ForCausalLM" in text
        or "Cohere2ForCausalLM, CohereForCausalLM" in text
    )
    assert "Names like it" not in refused({"architectures": ["XyzzyLM"], "model_type": "xyzzy"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "above the limit of 1024"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads is 6"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor must be a list"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["x", "y"]}, "'x'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (MIXTRAL | {"num_local_experts": 2, "num_experts_per_tok": 3}, "experts"),
        (MIXTRAL | {"num_local_experts": 4097}, "has 4097 experts per layer; routing supports at most 4096. Use a"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], named: str) -> None:
    assert named in refused(changes)
