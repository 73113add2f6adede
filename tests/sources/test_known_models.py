"""The table of packaged models."""

from __future__ import annotations

import re

import pytest

from millrace.config import DEFAULT_MODEL
from millrace.sources.known_models import KNOWN_MODELS, find_known
from millrace.sources.library import nearest_name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("smollm2", "smollm2-135m-instruct"),
        ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b"),
        ("Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b"),
        ("gemma-3-270m", "gemma-3-270m"),
        ("minilm", "all-minilm-l6-v2"),
        ("reranker", "mini-reranker"),
        (" TinyLlama-1.1B-Chat ", "tinyllama-1.1b-chat"),
    ],
)
def test_names_and_aliases_are_found_in_any_case(typed: str, name: str) -> None:
    found = find_known(typed)
    assert found is not None
    assert found.name == name


def test_the_default_model_is_known() -> None:
    found = find_known(DEFAULT_MODEL)
    assert found is not None
    assert found.sha256.startswith("b179c952")
    assert found.num_bytes == 98_362_432


def test_misspellings_get_the_nearest_name_and_nonsense_gets_none() -> None:
    assert nearest_name("smolm2-135m-instruct") == "smollm2-135m-instruct"
    assert nearest_name("qwen2.5-codr-1.5b") == "qwen2.5-coder-1.5b"
    assert nearest_name("lama3") == "llama3"
    assert nearest_name("zzz") is None


def test_every_entry_is_pinned_and_no_name_is_used_twice() -> None:
    names = [name for model in KNOWN_MODELS for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    for model in KNOWN_MODELS:
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", package.version) for package in model.packages)
        assert len({(package.name, package.member) for package in model.packages}) == len(model.packages)
        assert all(re.fullmatch(r"[0-9a-f]{64}", file.sha256) for file in model.files)
        if model.weights:  # Its package holds other files too.
            continue
        # Members are barely compressible, so the archives' sizes must be near the model's.
        assert 0.8 < model.download_bytes / model.num_bytes <= 1.0
