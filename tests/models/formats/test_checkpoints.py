"""Quantised checkpoints end to end: right answers, no wider weights, exceptions per module, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inside import weights_of
from helpers.paged import PagedDriver
from helpers.quantised_files import (
    Packed,
    awq,
    fp8,
    gptq,
    llm_int8,
    mxfp4,
    nf4,
    pack_quantized,
    torchao_int4,
    write_checkpoint,
)
from helpers.tiny_models import VOCAB, StateDictSource

from millrace.errors import ConfigError, ModelError
from millrace.models import grouped as grouped_module
from millrace.models import kept_weights
from millrace.models import load as load_module
from millrace.models.decoder import Decoder
from millrace.models.grouped import GroupedMatrices
from millrace.models.load import build_decoder, has_quantised_weights, load_decoder, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.weight_sizes import spec_weight_bytes
from millrace.models.weights import open_weights
from millrace.ops.cpp.native import native
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
TOKENS = [token * 7 % VOCAB for token in range(24)]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
TORCHAO = {"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}, "_tensor_data_names": ["qdata", "scale"]}
BY_32 = {"strategy": "group", "group_size": 32, "symmetric": True}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def written(folder: Path, name: str, **options: Any) -> StateDictSource:
    settings, pack, _ = CASES[name]
    header = TORCHAO if name == "torchao_int4" else None
    return write_checkpoint(folder, settings, pack, header=header, **options)


Pack = Callable[[torch.Tensor], Packed]
CASES: dict[str, tuple[dict[str, Any], Pack, float]] = {
    "awq": (AWQ, awq(), 0.32),
    "gptq": (GPTQ, gptq(), 0.32),
    "gptq_asymmetric": ({**GPTQ, "sym": False}, gptq(symmetric=False), 0.32),
    "gptq_v2": ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(symmetric=False, v2=True), 0.32),
    "gptq_act_order": ({**GPTQ, "desc_act": True}, gptq(act_order=True), 0.32),
    "gptq_8_bits": ({**GPTQ, "bits": 8}, gptq(bits=8), 0.56),
    "gptq_one_group": ({**GPTQ, "group_size": -1}, lambda weight: gptq(group=weight.shape[1])(weight), 0.32),
    "fp8_tensor": (FP8, fp8(), 0.56),
    "fp8_static": ({**FP8, "activation_scheme": "static"}, fp8(static=True), 0.56),
    "fp8_block": ({**FP8, "weight_block_size": [128, 128]}, fp8(128), 0.56),
    "w4a16": (compressed("pack-quantized", num_bits=4, type="int", **BY_32), pack_quantized, 0.32),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float", **BY_32), mxfp4, 0.36),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, 0.32),
    "llm_int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, 0.56),
    "torchao_int4": ({"quant_method": "torchao"}, torchao_int4, 0.32),
}
"""Settings, packer, and the largest share of the bytes in bfloat16 that the layers' matrices may take."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native()  # compiled kernels stay in the cache folder of all tests
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_decoder(resolve_model(str(folder)), device=CPU, dtype=dtype, **options)


def plain(source: StateDictSource, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = json.loads((folder / "config.json").read_text())
    return build_decoder(spec_from_config(config), source, device=CPU, dtype=dtype)


def logits(decoder: Decoder, chunk: int = 24) -> torch.Tensor:
    return PagedDriver(decoder, block_size=16).run(0, TOKENS, chunk)


EXACT, ROUNDED_OFFSETS = 1e-5, 6e-3
"""The CPU kernels read zero points as offsets in float16: 0.04% of the weights, 0.25% of these logits. Weights with
noise of that size give the same."""


WITH_OFFSETS = ("awq", "gptq_asymmetric", "gptq_v2", "torchao_int4", "llm_int8")
"""Also those with scales in float32."""


def tolerance(case: str) -> float:
    return ROUNDED_OFFSETS if case in WITH_OFFSETS else EXACT


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_dequantised_weights(case: str, tmp_path: Path) -> None:
    expected = logits(plain(written(tmp_path / "m", case), tmp_path / "m"))
    decoder = load(tmp_path / "m", deterministic=True)
    found = logits(decoder)
    assert error(found, expected) < tolerance(case)
    assert torch.equal(logits(decoder, 5), found), "batch-invariant"


@pytest.mark.parametrize("case", CASES)
def test_answers_without_cpu_kernels_are_exact(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(plain(written(tmp_path / "m", case), tmp_path / "m"))
    monkeypatch.setattr(load_module, "stored_matrices", lambda *_: None)
    monkeypatch.setattr(GroupedMatrices, "has_blocks", lambda *_: False)
    assert error(logits(load(tmp_path / "m")), expected) < EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_held_as_small_as_they_are_stored(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    share = CASES[case][2]
    folder = tmp_path / "m"
    source = written(folder, case)
    seen: list[tuple[int, int]] = []
    decoder = load(folder, dtype, progress=lambda done, total: seen.append((done, total)))
    files = resolve_model(str(folder))
    assert seen[-1] == (decoder.num_bytes, decoder.num_bytes)
    assert weight_bytes(files, dtype, device=CPU) == decoder.num_bytes
    layers = sum(tensor.numel() for name, tensor in source.tensors.items() if "_proj.weight" in name)
    others = spec_weight_bytes(decoder.spec, dtype) - layers * dtype.itemsize
    assert decoder.num_bytes - others < share * layers * 2
    held = [
        linear.num_bytes
        for layer in weights_of(decoder).layers
        for linear in (layer.mixer.qkv, layer.mixer.out, layer.mlp.gate_up.linear, layer.mlp.down)  # type: ignore
    ]
    assert sum(held) < share * layers * 2 + 4096


@pytest.mark.parametrize("case", ["awq", "gptq", "gptq_8_bits", "w4a16", "mxfp4", "llm_int8", "torchao_int4"])
def test_cpu_kernels_read_integers(case: str, tmp_path: Path) -> None:
    expected = logits(plain(written(tmp_path / "m", case), tmp_path / "m"))
    assert has_quantised_weights(resolve_model(str(tmp_path / "m")))
    decoder = load(tmp_path / "m", quantization="int8")
    assert decoder.native_stack is not None
    assert {decoder.choices[f"{key}_linear"].version.name for key in ("qkv", "out", "gate_up", "down")} == {"int8"}
    assert error(logits(decoder), expected) < 0.05


@pytest.mark.parametrize("case", CASES)
def test_mixture_of_experts(case: str, tmp_path: Path) -> None:
    source = written(tmp_path / "m", case, case="qwen3_moe", moe_intermediate_size=64)
    assert error(logits(load(tmp_path / "m")), logits(plain(source, tmp_path / "m"))) < tolerance(case)


def test_modules_that_are_not_quantised_stay_plain(tmp_path: Path) -> None:
    """Also one part of a fused matrix, and all of the last layer."""

    def skip(module: str) -> bool:
        return module.endswith(("layers.0.self_attn.k_proj", "layers.0.mlp.down_proj")) or "layers.1." in module

    for name in ("awq", "fp8_block"):
        settings, pack, _ = CASES[name]
        folder = tmp_path / name
        names = ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj", "model.layers.1"]
        settings = {**settings, "modules_to_not_convert": names}
        source = write_checkpoint(folder, settings, pack, skip=skip)
        assert error(logits(load(folder)), logits(plain(source, folder))) < tolerance(name), name
        assert load(folder, quantization="int8" if name == "awq" else "none").num_bytes


def test_cpu_kernels_read_inputs_in_another_order_and_parts_of_which_some_are_plain(tmp_path: Path) -> None:
    for name, skip in (("gptq_act_order", ""), ("gptq", "k_proj")):
        folder = tmp_path / name
        source = written(folder, name, skip=lambda module, end=skip or "none": module.endswith(end))
        expected = logits(plain(source, folder))
        exact, rounded = load(folder), load(folder, quantization="int8")
        assert exact.choices["qkv_linear"].version.name == "blocks"
        assert rounded.choices["qkv_linear"].version.name == "blocks_int8"
        assert error(logits(exact), expected) < EXACT, name
        assert error(logits(rounded), expected) < 0.05, name


def test_a_format_without_cpu_kernels_is_named_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, expected in (("fp8_block", "no CPU kernel reads FP8, blocks of 128 × 128: 8 matrices"), ("gptq", "")):
        caplog.clear()
        written(tmp_path / name, name)
        load(tmp_path / name)
        warnings = [record.getMessage() for record in caplog.records if "no CPU kernel" in record.getMessage()]
        assert len(warnings) == bool(expected)
        assert all(expected in warning for warning in warnings)


@pytest.mark.parametrize("case", ["fp8_tensor", "fp8_static"])
def test_devices_with_fp8_multiply_the_stored_numbers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference of fp8_linear stands in for a GPU."""
    monkeypatch.setattr(grouped_module, "fp8_missing", lambda _: "")
    source = written(tmp_path / "m", case)
    decoder = load(tmp_path / "m", torch.bfloat16)
    assert {decoder.choices[f"{key}_linear"].version.op for key in ("qkv", "out", "gate_up", "down")} == {"fp8_linear"}
    found, expected = logits(decoder), logits(plain(source, tmp_path / "m", torch.bfloat16))
    assert error(found, expected) < 0.2, "activations are rounded to FP8"
    assert decoder.num_bytes == weight_bytes(resolve_model(str(tmp_path / "m")), torch.bfloat16, device=CPU)
    qkv: Any = weights_of(decoder).layers[0].mixer.qkv  # type: ignore[attr-defined]
    assert qkv.weight.values.dtype == torch.float8_e4m3fn
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    torch.testing.assert_close(qkv.weight.widen(), torch.cat([source.tensors[name] for name in names]))


def test_mixed_bits_by_rule(tmp_path: Path) -> None:
    rules = {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}, ".*v_proj": {"sym": False}}
    source = write_checkpoint(
        tmp_path / "m",
        {**GPTQ, "dynamic": rules},
        gptq(),
        skip=lambda module: module.endswith("o_proj"),
        packs={"down_proj": gptq(bits=8, group=32), "v_proj": gptq(symmetric=False)},
    )
    assert error(logits(load(tmp_path / "m")), logits(plain(source, tmp_path / "m"))) < ROUNDED_OFFSETS


def test_biases_of_zeros_that_the_model_does_not_have_are_dropped(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> Packed:
        stored, value = gptq()(weight)
        return {**stored, "bias": torch.zeros(weight.shape[0], dtype=torch.float16)}, value

    source = write_checkpoint(tmp_path / "m", GPTQ, pack)
    assert error(logits(load(tmp_path / "m")), logits(plain(source, tmp_path / "m"))) < EXACT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "quip"}, r"'quip'.*awq.*GGUF"),
        ({"quant_method": "torchao"}, "torchao 0.14"),
        ({**AWQ, "version": "gemv_fast"}, "layout gemv_fast.*gemm"),
        ({**AWQ, "bits": 8}, "AWQ with 8 bits"),
        ({**AWQ, "bits": None}, "AWQ with None bits"),
        ({**AWQ, "group_size": "x"}, "quantization_config"),
        ({**AWQ, "group_size": 32}, "scales has shape"),
        ({**GPTQ, "bits": 3}, "GPTQ with 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "layout marlin"),
        ({**FP8, "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "marlin-24"}}}, "marlin-24"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", settings, awq())
    with pytest.raises(ModelError, match=named):
        load(tmp_path / "m")


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", AWQ, awq())
    files = resolve_model(str(tmp_path / "m"))
    with pytest.raises(ConfigError, match="quantised already"):
        build_decoder(
            spec_from_config(files.config),
            open_weights(files),
            device=CPU,
            dtype=torch.bfloat16,
            quantization="fp8",
        )
