"""The language models of checkpoints that take pictures, read from such a checkpoint, against the whole model."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from safetensors.torch import load_file, save_file

from millrace.errors import ModelError
from millrace.models.load import load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.weights import open_weights
from millrace.sources.resolve import resolve_model

VOCAB = 97
TOKENS = random.Random(5).choices(range(20, VOCAB), k=25)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "partial_rotary_factor": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "Mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": VISION | {"model_type": "pixtral"}},
    "Llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
    "Gemma3": {
        "text_config": TEXT,
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "Cohere2Vision": {
        "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 6},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
    },
    "Idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
    "Qwen2_5_VL": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "Qwen3VL": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "Qwen3_5": {"text_config": TEXT | DELTA | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "Qwen3VLMoe": {"text_config": TEXT | EXPERTS | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
}


def saved(kind: str, path: Path, **changes: Any) -> Any:
    """A checkpoint of the whole model, with random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **copy.deepcopy(CASES[kind]) | changes
    )  # It writes into nested dicts.
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("norm.weight") and kind not in ("Gemma3", "Qwen3_5")
            torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.3 if "norm" in name else 0.15)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_texts_have_the_logits_of_the_whole_model(
    kind: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(kind, tmp_path, tie_word_embeddings=tied)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    if kind == "Cohere2Vision":  # transformers scales the logits of the language model alone.
        expected = expected * model.config.text_config.logit_scale
    with caplog.at_level(logging.WARNING):
        decoder = load_decoder(resolve_model(str(tmp_path)), device=torch.device("cpu"), dtype=torch.float32)
    assert "it takes text, no pictures" in caplog.text
    found = PagedDriver(decoder).run(0, TOKENS, 7)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert decoder.spec.tied_head == (model.lm_head.weight is model.get_input_embeddings().weight)


def test_experts_with_rows_and_columns_exchanged(tmp_path: Path) -> None:
    """As Qwen3-VL's are published; transformers saves them as it holds them."""
    saved("Qwen3VLMoe", tmp_path)
    files = resolve_model(str(tmp_path))
    plain, tensors = open_weights(files), load_file(tmp_path / "model.safetensors")
    expected = {name: plain.get(name) for name in plain.names()}
    stacked = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert len(stacked) == 6
    save_file(tensors | stacked, tmp_path / "model.safetensors")
    found = open_weights(files)
    assert all(torch.equal(found.get(name), tensor) for name, tensor in expected.items())


def test_published_configs_that_do_not_nest_the_text() -> None:
    config = {
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 100.0,
        "vision_config": {"hidden_size": 16},
    }
    spec = spec_from_config(config)
    assert (spec.family, spec.ropes[0].kind, spec.ropes[0].theta) == ("qwen2", "default", 100.0)


def test_an_unknown_language_model_is_refused() -> None:
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration"):
        spec_from_config({**TEXT, "architectures": ["LlavaForConditionalGeneration"], "model_type": "opt"})
