"""Checkpoints of ModelOpt, Quark, FBGEMM and HQQ, AutoAWQ's version gemv, and settings in a file beside config.json.
The packers follow the tools' own, not the readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.quantised_files import (
    E2M1,
    Packed,
    Tensors,
    fp8,
    gptq,
    integers,
    mxfp4,
    nearest,
    packed_words,
    values_of,
    write_checkpoint,
)

from millrace.errors import ModelError
from millrace.models.load import load_decoder
from millrace.models.weights import open_weights
from millrace.models.weights.quantised_weights import QuantisedWeights
from millrace.sources.resolve import resolve_model


def by_output(weight: torch.Tensor) -> Packed:
    """FP8 with a scale per output, as FBGEMM writes it."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
    return stored, codes.float() * scales


def nvfp4(weight: torch.Tensor) -> Packed:
    """ModelOpt's: the number for all multiplies the scales."""
    groups = weight.reshape(len(weight), -1, 16)
    whole = weight.abs().amax() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    steps = scales.float()[..., None] * whole
    codes = nearest(groups / steps, E2M1)
    flat = codes.flatten(1)
    stored = {
        "weight": (flat[:, 0::2] | flat[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.01),
    }
    return stored, (torch.tensor(E2M1)[codes] * steps).view(weight.shape)


def quark_mxfp4(weight: torch.Tensor) -> Packed:
    stored, value = mxfp4(weight)
    return {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"]}, value


def hqq(weight: torch.Tensor, bits: int = 4, group: int = 64) -> Packed:
    """As HQQ's Quantizer does along axis 1, with the tensors that its layers save."""
    groups = weight.reshape(-1, group)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).half()
    codes = (groups / scales.float() + zeros.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
    half = len(codes) // 2
    rest = {"nbits": torch.tensor(bits), "axis": torch.tensor(1), "shape": torch.tensor(weight.shape)}
    packed = codes if bits == 8 else (codes[:half] << 4) | codes[half:]
    stored = {"W_q": packed, "scale": scales, "zero": zeros, **rest}
    return stored, ((codes.float() - zeros.float()) * scales.float()).view(weight.shape)


def awq_gemv(weight: torch.Tensor, group: int = 64) -> Packed:
    """With scales and zero points padded to whole words, and those to a multiple of two."""
    codes, scales, zeros = integers(weight, 4, group, symmetric=False)
    width = -(-scales.shape[1] // 16) * 16
    pad = (0, width - scales.shape[1])
    stored: Tensors = {
        "qweight": packed_words(codes, 4),
        "qzeros": packed_words(torch.nn.functional.pad(zeros, pad), 4),
        "scales": torch.nn.functional.pad(scales, pad),
    }
    return stored, values_of(codes, scales, zeros, torch.arange(weight.shape[1]) // group)


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": {}}


HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1, "view_as_float": False}}
FP8_STATIC = fp8(static=True)
CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "modelopt_fp8": (modelopt("FP8"), FP8_STATIC, "FP8, a scale per tensor"),
    "modelopt_nvfp4": (modelopt("NVFP4"), nvfp4, "NVFP4, groups of 16"),
    "quark_fp8": ({"quant_method": "quark", "exclude": ["lm_head"]}, FP8_STATIC, "FP8, a scale per tensor"),
    "quark_mxfp4": ({"quant_method": "quark"}, quark_mxfp4, "MXFP4, groups of 32"),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}, by_output, "FP8, a scale per output"),
    "hqq": ({"quant_method": "hqq", "quant_config": HQQ, "skip_modules": ["lm_head"]}, hqq, "HQQ 4-bit, groups of 64"),
    "awq_gemv": ({"quant_method": "awq", "version": "gemv", "group_size": 64}, awq_gemv, "AWQ 4-bit, groups of 64"),
}


def check(folder: Path, expected: dict[str, torch.Tensor], label: str) -> None:
    """Every weight has the tool's values, and a decoder takes all tensors."""
    source = open_weights(resolve_model(str(folder)))
    assert isinstance(source, QuantisedWeights)
    assert len(source.matrices()) == 14
    for name, matrix in source.matrices().items():
        torch.testing.assert_close(source.get(name), expected[name].float(), rtol=1e-5, atol=1e-6)
        assert matrix.label == label
        assert matrix.num_bytes == source.grouped(name, torch.bfloat16).num_bytes
    load_decoder(resolve_model(str(folder)), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_tool_means(case: str, tmp_path: Path) -> None:
    settings, pack, label = CASES[case]
    source = write_checkpoint(tmp_path / "m", settings, pack)
    check(tmp_path / "m", source.tensors, label)


def test_hqq_has_rules_by_the_end_of_a_modules_name(tmp_path: Path) -> None:
    eight = {"weight_quant_params": {"nbits": 8, "group_size": 32, "axis": 1}}
    rules = {"self_attn.q_proj": eight, "mlp.down_proj": eight}
    rules |= {f"self_attn.{name}_proj": HQQ for name in "kvo"} | {f"mlp.{name}_proj": HQQ for name in ("gate", "up")}
    packs = {name: lambda weight: hqq(weight, 8, 32) for name in rules if rules[name] is eight}
    source = write_checkpoint(tmp_path / "m", {"quant_method": "hqq", "quant_config": rules}, hqq, packs=packs)
    found = open_weights(resolve_model(str(tmp_path / "m")))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        full = f"model.layers.1.{name}.weight"
        torch.testing.assert_close(found.get(full), source.tensors[full], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "settings", "pack", "label"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "sym": True}, gptq(), "GPTQ 4-bit, groups of 64"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMV"}, awq_gemv, "AWQ 4-bit, groups of 64"),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            FP8_STATIC,
            "FP8, a scale per tensor",
        ),
    ],
)
def test_settings_may_lie_in_a_file_beside_the_config(
    file: str, settings: dict[str, Any], pack: Any, label: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "m", {}, pack)
    (tmp_path / "m" / file).write_text(json.dumps(settings))
    check(tmp_path / "m", source.tensors, label)


def test_scales_of_another_engines_cache_are_left_out(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> Packed:
        stored, value = FP8_STATIC(weight)
        return {**stored, "k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}, value

    packs = {"k_proj": pack, "v_proj": pack}
    source = write_checkpoint(tmp_path / "m", modelopt("FP8"), FP8_STATIC, packs=packs)
    check(tmp_path / "m", source.tensors, "FP8, a scale per tensor")


@pytest.mark.parametrize(
    ("settings", "pack", "named"),
    [
        (modelopt("W4A8_AWQ"), fp8(), "ModelOpt's W4A8_AWQ.*FP8 or NVFP4"),
        (modelopt("NVFP4"), quark_mxfp4, "ModelOpt's MXFP4"),
        ({**modelopt("FP8"), "ignore": ["*.mlp.*"]}, fp8(), "the settings exclude it"),
        ({"quant_method": "quark"}, lambda weight: (nvfp4(weight)[0], weight), "Quark with weights.*FP8 or MXFP4"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3}}}, hqq, "HQQ with 3 bits"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"axis": 0}}}, hqq, "axis=1"),
        ({"quant_method": "awq", "version": "gemv_fast"}, awq_gemv, "layout gemv_fast"),
        *(
            ({"quant_method": name}, hqq, f"'{name}', which is not supported. Use a checkpoint quantised with fp8")
            for name in ("aqlm", "eetq", "spqr", "vptq", "bitnet", "higgs", "quanto")
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, Any], pack: Any, named: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "m", settings, pack)
    with pytest.raises(ModelError, match=named):
        open_weights(resolve_model(str(tmp_path / "m")))
