"""`millrace bench formats`: a table of formats, and texts that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from helpers.quantised_files import gptq, write_checkpoint
from tokenizers import Tokenizer, models

from millrace.bench.micro.formats import FormatRun, format_figures, read_text
from millrace.errors import ConfigError

pytestmark = pytest.mark.live
SHAPE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_each_model_has_its_memory_steps_and_perplexity(tmp_path: Path) -> None:
    text = tmp_path / "text.gz"
    text.write_bytes(gzip.compress(b"One small step after the other. " * 8))
    model = str(tmp_path / "m")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    write_checkpoint(tmp_path / "m", settings, gptq(group=32), vocab_size=300)
    letters = {chr(code): code for code in range(128)}
    backend = Tokenizer(models.BPE({**letters, "<unk>": 128}, [], unk_token="<unk>"))
    backend.save(str(tmp_path / "m" / "tokenizer.json"))
    run = FormatRun([model], (1, 2), text, window=32, windows=2)
    figures = {figure.metric: figure for figure in format_figures(run, device="cpu", threads=1, kv_gib=0.05)}
    assert figures["weights"].value > 0
    assert "GPTQ 4-bit, groups of 32" in figures["weights"].note
    assert {"decode step, batch 1", "decode step, batch 2"} <= figures.keys()
    assert figures["perplexity"].value > 1
    assert figures["perplexity"].requests == 62


def test_a_shape_has_random_weights_in_each_format(tmp_path: Path) -> None:
    shape = tmp_path / "small.json"
    shape.write_text(json.dumps(SHAPE))
    run = FormatRun([str(shape)], (2,), formats=("plain", "Q4_K", "gptq"))
    figures = list(format_figures(run, device="cpu", threads=1, kv_gib=0.05))
    sizes = [figure.value for figure in figures if figure.metric == "weights"]
    assert len(sizes) == 3
    assert sizes[1] < sizes[0]
    assert [figure.metric for figure in figures] == ["weights", "decode step, batch 2"] * 3


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "damaged.gz").write_bytes(b"\x1f\x8bnothing")
    for name in ("missing.txt", "damaged.gz"):
        with pytest.raises(ConfigError, match=name):
            read_text(tmp_path / name)
    assert len(read_text(None)) > 1000
