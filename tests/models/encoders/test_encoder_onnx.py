"""Weights of ONNX files are those of the safetensors file they were exported from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.onnx_files import Style, model, node, tensor, write_onnx
from helpers.tiny_encoders import save_encoder
from safetensors.torch import load_file

from millrace.errors import ModelError
from millrace.models.encoders.encoder import pack
from millrace.models.encoders.load import LoadedEncoder, load_encoder
from millrace.models.weights.onnx_weights import OnnxWeights
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
TEXTS = [[2, 5, 6, 7, 3], [2, 9, 3]]


def load(source: Path) -> LoadedEncoder:
    return load_encoder(resolve_model(str(source)), device=CPU, dtype=torch.float32)


def results(loaded: LoadedEncoder) -> list[torch.Tensor]:
    packed, _ = pack(TEXTS, [0] * len(TEXTS), [0] * len(TEXTS))
    return loaded.head(loaded.encoder(packed), packed)


@pytest.mark.parametrize(
    ("case", "kind", "style", "external"),
    [
        ("bert", "Model", "scoped", False),
        ("bert", "Model", "numbered", True),
        ("bert", "ForSequenceClassification", "numbered", False),
        ("modernbert", "Model", "scoped", False),  # has no biases: names follow from the nodes' scopes
        ("distilbert", "ForTokenClassification", "numbered", False),
    ],
)
def test_results_are_equal(case: str, kind: str, style: Style, external: bool, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", case, kind)
    expected = results(load(folder))
    write_onnx(folder, style, external=external)
    for own, other in zip(results(load(folder)), expected, strict=True):
        assert torch.equal(own, other)
    for own, other in zip(results(load(folder / "onnx" / "model.onnx")), expected, strict=True):
        assert torch.equal(own, other)


def test_matrices_of_8_bits_become_floats(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", "bert", "ForSequenceClassification", num_labels=1)
    stored = load_file(folder / "model.safetensors")
    expected = results(load(folder))
    write_onnx(folder, "int8")
    source = OnnxWeights(folder / "onnx" / "model.onnx")
    assert set(source.names()) == set(stored)
    for name, values in stored.items():
        read = source.get(name, dtype=torch.float32)
        assert read.shape == source.shape(name) == values.shape
        torch.testing.assert_close(read, values, atol=float(values.max() - values.min()) / 255, rtol=0)
    assert not torch.equal(results(load(folder))[0], expected[0])
    torch.testing.assert_close(results(load(folder))[0], expected[0], atol=0.1, rtol=0)


def test_fused_operators_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    weights = tensor("qkv", np.zeros((4, 12), np.float32))
    path.write_bytes(model([node("Attention", "Attention_0", ["x", "qkv"], "out")], [weights]))
    with pytest.raises(ModelError, match=r"fused attention .operator Attention"):
        OnnxWeights(path)


@pytest.mark.parametrize("content", [b"", b"not an ONNX file", b"\x3a\xff\xff\x03only a part"])
def test_damaged_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx"):
        OnnxWeights(path)


def test_a_model_that_writes_text_is_not_read_from_onnx(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="only encoders are read from ONNX"):
        resolve_model(str(tmp_path))


def test_several_files_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for name in ("model_int8.onnx", "model_fp16.onnx"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"several ONNX files .model_fp16\.onnx, model_int8\.onnx"):
        resolve_model(str(tmp_path))
