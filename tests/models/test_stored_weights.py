"""Models with stored weights: same results, fewer bytes, and a verified cache."""

from __future__ import annotations

import logging
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inside import without_compiler
from helpers.paged import PagedDriver
from helpers.stored_blocks import StoredSource

from millrace.models import kept_weights
from millrace.models import load as load_module
from millrace.models import stored as stored_module
from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder, load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import layout_of
from millrace.models.stored import StoredMatrices
from millrace.models.weight_sizes import spec_weight_bytes
from millrace.ops.cpp import native as native_module
from millrace.ops.linear.stored import FORMATS
from millrace.sources.resolve import resolve_model

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **SIZES}
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTURE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
MIXED = {
    "embed_tokens.weight": "Q8_0",
    "lm_head.weight": "Q6_K",
    "q_proj.weight": "Q4_K",
    "k_proj.weight": "Q4_K",
    "v_proj.weight": "Q6_K",
    "o_proj.weight": "Q4_1",
    "gate_proj.weight": "Q5_0",
    "up_proj.weight": "Q5_0",
    "down_proj.weight": "Q3_K",
}
TOKENS = random.Random(7).choices(range(100), k=40)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test, except for the compiled kernels."""
    native_module.native()
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "packed"


def source_of(config: dict[str, Any], formats: dict[str, str], tmp_path: Path) -> tuple[Any, StoredSource]:
    file = tmp_path / "model.gguf"
    if not file.exists():
        file.write_bytes(b"weights")
    spec = spec_from_config(config)
    return spec, StoredSource(spec, formats, file)


def build(spec: Any, source: StoredSource, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Decoder:
    return build_decoder(spec, source, device=CPU, dtype=dtype, **options)


def build_dequantised(spec: Any, source: StoredSource, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Decoder:
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "stored_matrices", lambda *_: None)
        return build(spec, source, dtype)


def logits(decoder: Decoder, chunk: int = 40) -> torch.Tensor:
    return PagedDriver(decoder, block_size=16).run(0, TOKENS, chunk)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("config", [LLAMA, TIED, MIXTURE], ids=["llama", "tied", "mixture"])
def test_logits_equal_those_of_dequantised_weights(
    config: dict[str, Any], dtype: torch.dtype, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, source = source_of(config, MIXED, tmp_path)
    expected = build_dequantised(spec, source, monkeypatch, dtype)
    for _ in range(2):  # packed now, then mapped from the cache
        decoder = build(spec, source, dtype)
        assert decoder.num_bytes < 0.6 * expected.num_bytes
        for chunk in (1, 40):
            assert torch.equal(logits(decoder, chunk), logits(expected, chunk))


@pytest.mark.parametrize("config", [LLAMA, TIED, MIXTURE], ids=["llama", "tied", "mixture"])
def test_int8_products_are_close_to_exact_ones_and_need_no_float32_copy(
    config: dict[str, Any], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, source = source_of(config, MIXED, tmp_path)
    exact = build(spec, source, torch.float32)
    expected = logits(exact)
    for _ in range(2):  # packed now, then mapped from the cache
        decoder = build(spec, source, torch.float32, quantization="int8", deterministic=True)
        assert decoder.num_bytes < 0.3 * exact.num_bytes
        found = logits(decoder)
        assert torch.equal(logits(decoder, 1), found)
        assert (found - expected).norm() < 0.1 * expected.norm()
        assert not torch.equal(found, expected)
    assert (decoder.native_stack is None) == (config is MIXTURE)
    assert decoder.choices["expert_linear" if config is MIXTURE else "down_linear"].version.name == "int8"


LARGER = {
    "Q2_K": 164 / 84,
    "TQ2_0": 164 / 66,
    "TQ1_0": 164 / 54,
    "Q3_K": 146 / 110,
    "IQ1_S": 274 / 50,
    "IQ1_M": 274 / 56,
    "IQ2_XXS": 274 / 66,
    "IQ2_XS": 274 / 74,
    "IQ2_S": 274 / 82,
    "IQ3_XXS": 274 / 98,
    "IQ3_S": 274 / 110,
    "Q4_K": 148 / 144,
    "Q5_K": 180 / 176,
    "IQ4_XS": 138 / 136,
    "MXFP4": 18 / 17,
}
"""Bytes in memory per byte of the file, where they differ (docs/formats.md)."""


@pytest.mark.parametrize("kind", FORMATS)
def test_the_memory_that_every_format_takes(kind: str, tmp_path: Path, folder: Path) -> None:
    spec, source = source_of({**LLAMA, "vocab_size": 128}, {"_proj.weight": kind, "lm_head.weight": kind}, tmp_path)
    matrices = [name for name in source.names() if source.stored_format(name)]
    in_file = sum(source.stored_rows(name).nbytes for name in matrices)
    plain = sum(math.prod(shape) for name, shape in source.shapes.items() if name not in matrices)
    for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"quantization": "int8"})):
        held = build(spec, source, dtype, **options).num_bytes - plain * dtype.itemsize
        assert held == pytest.approx(in_file * LARGER.get(kind, 1), rel=0.02)  # panels end at 64 bytes


def test_choices_name_the_stored_weights(tmp_path: Path, folder: Path) -> None:
    spec, source = source_of(LLAMA, {**MIXED, "down_proj.weight": "NVFP4"}, tmp_path)
    choices = build(spec, source).choices
    kept = {"qkv_linear", "out_linear", "gate_up_linear", "head"}
    assert all((choices[key].version.op, choices[key].version.name) == ("stored_linear", "native") for key in kept)
    assert choices["embedding"].version.name == "native"
    assert choices["down_linear"].version.op == "linear"  # a format that the kernels do not read


def test_progress_ends_at_the_predicted_bytes(tmp_path: Path, folder: Path) -> None:
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    stored = StoredMatrices(source, layout_of(spec), torch.bfloat16, folder)
    total = spec_weight_bytes(spec, torch.bfloat16) - stored.saved_bytes()
    assert not folder.exists()
    for _ in range(2):
        seen: list[tuple[int, int]] = []
        decoder = build(spec, source, progress=lambda *counts, seen=seen: seen.append(counts))
        assert decoder.num_bytes == total
        assert seen[-1] == (total, total)


def test_without_a_compiler_weights_are_dequantised(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    without_compiler(monkeypatch)
    decoder = build(spec, source)
    assert decoder.num_bytes == spec_weight_bytes(spec, torch.bfloat16)
    assert decoder.choices["qkv_linear"].version.op == "linear"
    assert not folder.exists()


# --- the cache ---


def cached_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_the_second_start_reads_no_blocks(tmp_path: Path, folder: Path) -> None:
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    expected = logits(build(spec, source))
    assert source.rows_read
    file = cached_file(folder)
    source.rows_read.clear()
    assert torch.equal(logits(build(spec, source)), expected)
    assert not source.rows_read
    assert cached_file(folder) == file


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty", "directory"])
def test_a_damaged_file_is_rewritten(
    damage: str, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    expected = logits(build(spec, source))
    file = cached_file(folder)
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[:-1])
    elif damage == "longer":
        file.write_bytes(whole + b"\0")
    elif damage == "header":
        file.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.mkdir()
    source.rows_read.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(build(spec, source)), expected)
    assert source.rows_read
    if damage == "directory":
        assert "cannot be saved" in caplog.text
    else:
        assert file.read_bytes() == whole
    assert cached_file(folder) == file


def test_a_changed_model_file_is_packed_again(tmp_path: Path, folder: Path) -> None:
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    build(spec, source)
    os.utime(tmp_path / "model.gguf", ns=(1, 1))
    source.rows_read.clear()
    build(spec, source)
    assert source.rows_read
    assert len(list(folder.iterdir())) == 2


def test_other_formats_have_their_own_cache_file(tmp_path: Path, folder: Path) -> None:
    for formats in (MIXED, {**MIXED, "o_proj.weight": "Q8_0"}):
        spec, source = source_of(LLAMA, formats, tmp_path)
        build(spec, source)
    assert len(list(folder.iterdir())) == 2


def test_only_the_most_recently_used_files_are_kept(tmp_path: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for age in range(8):
        (folder / f"{age}.packed").touch()
        os.utime(folder / f"{age}.packed", (1_000 - age, 1_000 - age))
    (folder / "abandoned.tmp").touch()
    os.utime(folder / "abandoned.tmp", (1_000, 1_000))
    (folder / "others.tmp").touch()
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    build(spec, source)
    names = {path.name for path in folder.iterdir()}
    assert len(names) == stored_module.KEPT_FILES + 1
    assert {"0.packed", "1.packed", "2.packed", "others.tmp"} < names


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    spec, source = source_of(LLAMA, MIXED, tmp_path)
    with caplog.at_level(logging.WARNING):
        decoder = build(spec, source)
    assert "cannot be saved" in caplog.text
    assert torch.isfinite(logits(decoder)).all()


def test_a_failed_load_leaves_no_files(tmp_path: Path, folder: Path) -> None:
    spec, source = source_of(LLAMA, MIXED, tmp_path)

    def fail(name: str) -> Any:
        raise OSError("the disk is gone")

    source.stored_rows = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        build(spec, source)
    assert not list(folder.iterdir())


# --- the default model ---


def test_the_default_model_gives_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model("smollm2-135m-instruct")
    stored = load_decoder(files, device=CPU, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "stored_matrices", lambda *_: None)
        plain = load_decoder(files, device=CPU, dtype=torch.bfloat16)
    assert stored.num_bytes < 0.4 * plain.num_bytes
    prompt = [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198]
    assert greedy(stored, prompt, 12) == greedy(plain, prompt, 12)


def greedy(decoder: Decoder, prompt: list[int], count: int) -> list[tuple[int, float]]:
    """Tokens and, bit for bit, their logits."""
    driver, tokens, found = PagedDriver(decoder, block_size=16), prompt, []
    for _ in range(count):
        last = driver.step([(0, tokens)])[0][-1]
        tokens = [int(last.argmax())]
        found.append((tokens[0], float(last.max())))
    return found
