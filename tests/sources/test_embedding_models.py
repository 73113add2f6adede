"""A model says in its files that it was trained for embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import write_gguf

from millrace.sources.encoders.embedding_models import is_trained_to_embed
from millrace.sources.resolve import ModelFiles


@pytest.mark.parametrize(
    ("name", "marker", "expected"),
    [
        ("Qwen3-0.6B", None, False),
        ("Qwen3-Embedding-0.6B", None, True),
        ("e5-mistral-7b-instruct", "modules.json", True),
        ("gte-Qwen2", "config_sentence_transformers.json", True),
        ("gte-Qwen2", "generation_config.json", False),
    ],
)
def test_directories(tmp_path: Path, name: str, marker: str | None, expected: bool) -> None:
    if marker is not None:
        (tmp_path / marker).write_text("{}")
    assert is_trained_to_embed(ModelFiles(name, "safetensors", tmp_path, {}, ())) is expected


@pytest.mark.parametrize(
    ("metadata", "expected"), [({}, False), ({"qwen3.pooling_type": 0}, False), ({"qwen3.pooling_type": 3}, True)]
)
def test_gguf_files(tmp_path: Path, metadata: dict[str, int], expected: bool) -> None:
    path = write_gguf(tmp_path / "model.gguf", metadata, {"token_embd.weight": np.zeros((4, 64), np.float32)}, "qwen3")
    assert is_trained_to_embed(ModelFiles("model", "gguf", path, {}, (path,))) is expected
