"""The catalogue was entered by hand: its names, ids, parameter counts and sizes must agree with each other."""

from __future__ import annotations

import re

import gguf
import pytest

from millrace.sources.catalogue import BYTES_PER_WEIGHT, CatalogueEntry, entries, entry_of_files
from millrace.sources.known_models import KNOWN_MODELS
from millrace.sources.names import CHECKPOINT_FORMATS

SIZE = re.compile(r"(?<![a-z0-9.])e?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")
PER_EXPERT = re.compile(r"(\d+)x(\d+(?:\.\d+)?)b")


def sizes_in(name: str) -> list[float]:
    """Billions of parameters that a name states: 8B, 360M; the first is the whole, a later A3B the active part."""
    return [float(number) * (1 if unit == "b" else 1e-3) for number, unit in SIZE.findall(name.lower())]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_an_entry_agrees_with_itself(entry: CatalogueEntry) -> None:
    for name in (entry.name, entry.hub, entry.gguf):
        stated = sizes_in(name)
        if stated and not PER_EXPERT.search(name.lower()):
            assert 0.8 < entry.parameters / stated[0] < 1.35, f"{name} says {stated[0]} billion"
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.hub)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.gguf)
    assert 0 <= entry.active < entry.parameters
    assert 1024 <= entry.context <= 1 << 21
    assert entry.head_dim in (64, 80, 96, 128, 256, 512, 576)
    assert 1 <= entry.kv_heads <= 64
    assert 10 <= entry.layers <= 130
    for name, value in entry.sampling.items():
        assert name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
        assert 0 <= value <= 100


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_quantised_files_are_of_the_same_model(entry: CatalogueEntry) -> None:
    variants = r"[-_.](gguf|instruct|it|chat|hf|bf16)\b"
    plain = [re.sub(variants, "", one.rpartition("/")[2].lower()) for one in (entry.hub, entry.gguf)]
    model, quantised = (re.sub(r"^(meta-|google_|mistralai_|qwen_|microsoft_|deepseek-ai_)", "", one) for one in plain)
    assert sizes_in(entry.hub)[:1] == sizes_in(entry.gguf)[:1]
    assert model.split("-")[0] == quantised.split("-")[0], (model, quantised)
    for kind, repo in entry.quantised.items():
        assert kind in CHECKPOINT_FORMATS
        assert kind in repo.lower()
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", repo)
        assert entry_of_files(repo) == entry_of_files(entry.hub) == entry


def test_no_name_means_two_models() -> None:
    names = [name for entry in entries() for name in (entry.name, *entry.aliases)]
    names += [name for model in KNOWN_MODELS for name in (model.name, *model.aliases)]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert len(entries()) >= 40


@pytest.mark.parametrize("weight_format", ["q8_0", "q6_k", "q5_k_m", "q4_k_m"])
def test_sizes_follow_from_the_block_formats(weight_format: str) -> None:
    """A file is as large as its blocks, plus the tensors that stay at a higher precision."""
    block = weight_format.removesuffix("_m").upper()
    items, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block]]
    assert 1.0 <= BYTES_PER_WEIGHT[weight_format] / (num_bytes / items) < 1.12
