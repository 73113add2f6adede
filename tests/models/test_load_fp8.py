"""Loading with FP8 weights: quantised layers, memory, refusals and accuracy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver
from helpers.tiny_models import CASES, VOCAB, StateDictSource, config_of, make_reference

from millrace.config import load_config
from millrace.errors import ConfigError
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder, check_quantization, load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.weight_sizes import spec_weight_bytes
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
QUANTISED = ("qkv_linear", "out_linear", "gate_up_linear", "down_linear")


def tiny(case: str) -> tuple[Any, StateDictSource]:
    model = make_reference(case)
    return spec_from_config(config_of(model)), StateDictSource.of(model)


def build(spec: Any, source: StateDictSource, **options: Any) -> Decoder:
    return build_decoder(spec, source, device=CPU, **{"dtype": torch.bfloat16, "quantization": "fp8", **options})


@pytest.mark.parametrize("case", CASES)
def test_loaded_bytes_equal_the_prediction(case: str) -> None:
    spec, source = tiny(case)
    seen: list[tuple[int, int]] = []
    decoder = build(spec, source, progress=lambda done, total: seen.append((done, total)))
    total = spec_weight_bytes(spec, torch.bfloat16, "fp8")
    assert decoder.num_bytes == total < spec_weight_bytes(spec, torch.bfloat16)
    done = [pair[0] for pair in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert {pair[1] for pair in seen} == {total}


def test_layer_matrices_take_one_byte_per_weight_and_a_scale_per_output() -> None:
    spec, source = tiny("llama")
    shrunk = spec_weight_bytes(spec, torch.bfloat16) - spec_weight_bytes(spec, torch.bfloat16, "fp8")
    matrices = [t for name, t in source.tensors.items() if "_proj.weight" in name]
    assert shrunk == sum(t.numel() - 4 * t.shape[0] for t in matrices)


def test_which_ops_are_chosen() -> None:
    spec, source = tiny("llama")
    choices = build(spec, source).choices
    assert {choices[key].version.op for key in QUANTISED} == {"fp8_linear"}
    assert choices["head"].version.op == "linear"
    moe_spec, moe_source = tiny("qwen3_moe")
    choices = build(moe_spec, moe_source).choices
    assert choices["qkv_linear"].version.op == "fp8_linear"
    assert choices["router_linear"].version.op == choices["expert_linear"].version.op == "linear"


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe"])
def test_logits_stay_close_to_the_unquantised_ones(case: str) -> None:
    spec, source = tiny(case)
    tokens = [token * 7 % VOCAB for token in range(40)]
    plain = PagedDriver(build(spec, source, quantization="none"), block_size=16).run(0, tokens, 40)
    quantised = PagedDriver(build(spec, source), block_size=16).run(0, tokens, 40)
    assert torch.isfinite(quantised).all()
    assert not torch.equal(quantised, plain)
    error = ((quantised - plain).norm() / plain.norm()).item()
    assert error < 0.2, error


def test_logits_do_not_depend_on_chunks() -> None:
    spec, source = tiny("llama")
    decoder = build(spec, source)
    tokens = [token * 5 % VOCAB for token in range(50)]
    alone = PagedDriver(decoder, block_size=16).run(0, tokens, 50)
    assert torch.equal(PagedDriver(decoder, block_size=8).run(0, tokens, 7), alone)


def test_a_mixture_logs_that_its_experts_are_not_quantised(caplog: pytest.LogCaptureFixture) -> None:
    spec, source = tiny("mixtral")
    with caplog.at_level(logging.WARNING):
        build(spec, source)
    assert "experts stay in bfloat16" in caplog.text


# --- refusals ---


def test_refused_on_the_cpu_before_anything_is_read() -> None:
    files = resolve_model("smollm2-135m-instruct")
    with pytest.raises(ConfigError) as error:
        load_decoder(files, device=CPU, dtype=torch.bfloat16, quantization="fp8")
    for part in ("model.quantization is fp8", "GPU", "8.9", "the CPU", "--quantization none"):
        assert part in str(error.value)


def test_refused_with_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.models.load.fp8_missing", lambda device: "")
    with pytest.raises(ConfigError, match="float32. Set --dtype bfloat16"):
        check_quantization("fp8", CPU, torch.float32)
    check_quantization("fp8", CPU, torch.bfloat16)
    check_quantization("none", CPU, torch.float32)


def test_the_setting_accepts_only_known_names() -> None:
    assert load_config(None, {"model.quantization": "fp8"}).config.model.quantization == "fp8"
    with pytest.raises(ConfigError, match="must be one of auto, none, fp8, int8"):
        load_config(None, {"model.quantization": "int3"})


def test_int8_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="int8, which runs only on a CPU"):
        check_quantization("int8", torch.device("cuda"), torch.float32)
    with pytest.raises(ConfigError, match="model.dtype is bfloat16. Set --dtype float32 or auto"):
        check_quantization("int8", torch.device("cpu"), torch.bfloat16)
    check_quantization("int8", torch.device("cpu"), torch.float32)
