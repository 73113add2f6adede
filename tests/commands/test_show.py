"""`millrace show`: the formats of a checkpoint, their bytes, and what multiplies them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.quantised_files import awq, fp8, write_checkpoint

from millrace.cli import main

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


def shares(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, int, str]]:
    assert main(["show", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["formats"]
    return {share["format"]: (share["matrices"], share["bytes"], share["op"]) for share in found}


def test_a_quantised_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "m", AWQ, awq(), skip=lambda module: "layers.1." in module)
    found = shares(tmp_path / "m", capsys)
    matrices = [t for name, t in source.tensors.items() if "layers.0" in name and name.endswith("_proj.weight")]
    codes = sum(matrix.numel() for matrix in matrices) // 2
    groups = sum(matrix.numel() // 64 for matrix in matrices)
    assert found["AWQ 4-bit, groups of 64"] == (7, codes + 2 * groups + groups // 2, "stored_linear")
    assert "float32" in found
    assert main(["show", str(tmp_path / "m")]) == 0
    assert "AWQ 4-bit, groups of 64      7 ×" in capsys.readouterr().out


def test_fp8_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "m", {"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128))
    num_matrices, _, op = shares(tmp_path / "m", capsys)["FP8, blocks of 128 × 128"]
    assert (num_matrices, op) == (14, "grouped_linear")


def test_a_gguf_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "smollm2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    formats = facts["formats"]
    assert {share["format"] for share in formats} & {"Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16", "BF16"}
    assert 0.9 * facts["bytes"] < sum(share["bytes"] for share in formats) < facts["bytes"]


def test_what_cannot_be_served_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "m", {**AWQ, "version": "gemv_fast"}, awq())
    assert main(["show", str(tmp_path / "m")]) == 0
    assert "not served here: The checkpoint is quantised with AWQ in the layout gemv_fast" in capsys.readouterr().out
