"""`millrace bench encode`: what it counts, and how it compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.onnx_files import write_onnx
from helpers.tiny_encoders import save_encoder

from millrace.bench.encoding import shapes, throughput
from millrace.bench.encoding.throughput import WORDS, encode_figures, mixed_texts, shape_figures
from millrace.config import load_config
from millrace.errors import ConfigError
from millrace.llm import LLM

pytestmark = pytest.mark.live


def test_texts_are_the_same_every_time_and_of_mixed_lengths() -> None:
    texts = mixed_texts(50, 40)
    assert texts == mixed_texts(50, 40)
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 6
    assert max(lengths) <= 40
    assert len(set(lengths)) > 10


def test_an_encoder_is_compared_with_a_reference(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m")
    settings = {"model.source": str(folder), "run.device": "cpu", "run.threads": 1}
    config = load_config(None, settings).config
    reference = tmp_path / "python"
    reference.write_text("#!/bin/sh\necho loading\necho 3600.0\n")
    reference.chmod(0o755)
    figures = {(one.workload, one.metric): one.value for one in encode_figures(config, 16, str(reference))}
    assert figures["sentence-transformers", "texts_per_s"] == pytest.approx(16 / 3600)
    ratio = figures["encode", "texts_per_s"] / figures["sentence-transformers", "texts_per_s"]
    assert figures["encode", "ratio_to_sentence-transformers"] == pytest.approx(ratio)
    reference.write_text("#!/bin/sh\necho 'No module named sentence_transformers' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="No module named sentence_transformers"):
        list(encode_figures(config, 16, str(reference)))


def test_an_onnx_file_is_compared_with_onnx_runtime_too(tmp_path: Path) -> None:
    """In turns; sentence-transformers gets the same weights in a form that it reads."""
    folder = save_encoder(tmp_path / "m")
    write_onnx(folder)
    config = load_config(None, {"model.source": str(folder), "run.device": "cpu", "run.threads": 1}).config
    reference, log = tmp_path / "python", tmp_path / "log"
    reference.write_text(
        f"""#!/bin/sh
model=$(sed 's/.*"model": "\\([^"]*\\)".*/\\1/' "$3")
case "$2" in
  *"import onnxruntime"*) echo onnxruntime >> {log} ;;
  *) test -f "$model/model.safetensors" -a -f "$model/config.json" && echo sentence-transformers >> {log} ;;
esac
echo 3600.0
"""
    )
    reference.chmod(0o755)
    figures = {(one.workload, one.metric) for one in encode_figures(config, 16, str(reference))}
    assert log.read_text().split() == ["sentence-transformers", "onnxruntime"] * 2
    assert {("onnxruntime", "texts_per_s"), ("encode", "ratio_to_onnxruntime")} <= figures


def test_random_weights_in_a_shape_are_compared_with_transformers_if_only_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for sentence-transformers runs for real; its vectors are ours."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", (2, 48, 4, 80))
    monkeypatch.setattr(throughput, "ROUNDS", 1)  # The turns are tested above; each imports transformers.
    reference, vectors = tmp_path / "python", tmp_path / "vectors.json"
    keep = f"import json; json.dump(embed(texts).tolist(), open({str(vectors)!r}, 'w'))"
    reference.write_text(
        f"""#!/bin/sh
case "$2" in
  *sentence_transformers*) exit 1 ;;
esac
test $# = 2 && exec {sys.executable} -c "$2"
exec {sys.executable} -c "$2
{keep}" "$3"
"""
    )
    reference.chmod(0o755)
    config = load_config(None, {"run.device": "cpu", "run.threads": 1}).config
    figures = {(one.workload, one.metric) for one in shape_figures(config, "tiny", 16, str(reference))}
    assert ("tiny, random: encode", "ratio_to_transformers") in figures
    shapes.write_shape("tiny", tmp_path / "again", WORDS)
    texts = sorted(mixed_texts(16, 510), key=len, reverse=True)
    with LLM(str(tmp_path / "again"), device="cpu", threads=1, progress=False) as llm:
        ours = torch.tensor(np.array(llm.embed(texts, truncate=True)))
    torch.testing.assert_close(torch.tensor(json.loads(vectors.read_text())), ours, atol=1e-3, rtol=0)


def test_a_shape_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shapes of encoders are minilm"):
        shapes.write_shape("gigantic", tmp_path / "m", WORDS)


def test_a_classifier_is_measured_without_a_reference(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "bert", "ForSequenceClassification", num_labels=1)
    config = load_config(None, {"model.source": str(folder), "run.device": "cpu", "run.threads": 1}).config
    assert [one.metric for one in encode_figures(config, 8, "")] == ["texts_per_s", "tokens_per_s"]
    with pytest.raises(ConfigError, match="compares embedders"):
        list(encode_figures(config, 8, sys.executable))
