"""tools/dequantise.py converts a model without changing its values."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers.gguf_files import write_gguf

from millrace.models.weights.open import open_weights
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.tokenizers.hf_tokenizer import build_hf_tokenizer
from millrace.text.tokenizers.load import load_tokenizer

TOOL = Path(__file__).parents[2] / "tools" / "dequantise.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("dequantise_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gguf_file_in_float16_keeps_metadata_and_values(tool: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, GGMLQuantizationType.Q4_1)
    metadata = {"general.name": "tiny", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "ü", "<s>"]}
    tensors = {"blk.0.attn_q.weight": (packed, GGMLQuantizationType.Q4_1), "output_norm.weight": values[0]}
    source = write_gguf(tmp_path / "in.gguf", metadata, tensors)
    tool.write_gguf(source, tmp_path / "out.gguf")
    written = gguf.GGUFReader(tmp_path / "out.gguf")
    for key, value in metadata.items():
        assert written.fields[key].contents() == value
    found = {tensor.name: tensor for tensor in written.tensors}
    assert found["blk.0.attn_q.weight"].tensor_type == GGMLQuantizationType.F16
    assert found["output_norm.weight"].tensor_type == GGMLQuantizationType.F32
    wanted = gguf.quants.dequantize(packed, GGMLQuantizationType.Q4_1).astype(np.float16)
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"].data.reshape(4, 64), wanted)


def test_a_directory_holds_the_same_weights(tool: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    files = ModelFiles("tiny", "random", tmp_path / "config.json", config, ())
    tool.write_weights(files, tmp_path, "float32")
    again = resolve_model(str(tmp_path))
    before, after = open_weights(files), open_weights(again)
    assert set(before.names()) == set(after.names())
    for name in before.names():
        assert before.get(name).float().equal(after.get(name).float()), name


def test_the_tokenizer_gives_the_same_tokens(tool: Any, tmp_path: Path) -> None:
    own = load_tokenizer(resolve_model("smollm2-135m-instruct"))
    tool.write_tokenizer(own, tmp_path)
    written = build_hf_tokenizer(tmp_path, {})
    text = "Die Mühle dreht sich, 3 times a day.\n<|im_start|>user"
    assert written.encode(text) == own.encode(text)
