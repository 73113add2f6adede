"""`millrace bench encode`: what it counts, and how it compares."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.onnx_files import write_onnx
from helpers.tiny_encoders import save_encoder

from millrace.bench.encoding.throughput import encode_figures, mixed_texts
from millrace.config import load_config
from millrace.errors import ConfigError

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
