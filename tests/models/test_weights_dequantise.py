"""Dequantised tensors equal the gguf package's reference, for every type it can decode, mixed within a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as T
from helpers.gguf_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ModelError
from millrace.models.weights import open_weights
from millrace.ops.linear import gguf_values as module
from millrace.ops.linear.gguf_values import check_supported, dequantise
from millrace.sources.resolve import resolve_model


def can_decode(kind: T) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DECODABLE = [kind for kind in T if can_decode(kind)]
ROWS, COLUMNS = 6, 512


def random_blocks(kind: T, rng: np.random.Generator, rows: int = ROWS, columns: int = COLUMNS) -> npt.NDArray[np.uint8]:
    """Any bytes are valid blocks; some scales will be infinite or NaN."""
    items, size = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(0, 256, (rows, columns // items * size), dtype=np.uint8)


def reference(raw: npt.NDArray[np.uint8], kind: T) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, kind), dtype=np.float32)


def same(ours: torch.Tensor, theirs: npt.NDArray[np.float32]) -> bool:
    """Bit-equal, signs of zero included; all NaNs count as equal."""
    found = ours.numpy().reshape(theirs.shape)
    invalid = np.isnan(theirs)
    return bool(
        np.array_equal(np.isnan(found), invalid)
        and np.array_equal(found[~invalid].view(np.uint32), theirs[~invalid].view(np.uint32))
    )


def test_the_list_of_types_is_the_packages() -> None:
    assert len(DECODABLE) >= 26
    assert {T.F32, T.F16, T.BF16, T.Q4_1, T.Q8_0, T.Q4_K, T.Q6_K, T.IQ2_XXS, T.MXFP4} <= set(DECODABLE)


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
def test_random_blocks_decode_as_the_reference_decodes_them(kind: T) -> None:
    raw = random_blocks(kind, np.random.default_rng(kind.value), rows=24)
    out = torch.empty(24, COLUMNS)
    dequantise(raw, kind, out)
    assert same(out, reference(raw, kind))


@given(kind=st.sampled_from(DECODABLE), seed=st.integers(0, 2**32), rows=st.integers(1, 5))
def test_any_blocks_of_any_size(kind: T, seed: int, rows: int) -> None:
    raw = random_blocks(kind, np.random.default_rng(seed), rows, 256)
    out = torch.empty(rows, 256)
    dequantise(raw, kind, out)
    assert same(out, reference(raw, kind))


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.BF16, T.TQ1_0, T.TQ2_0, T.F16])
def test_quantised_real_numbers(kind: T) -> None:
    values = np.random.default_rng(3).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    raw = gguf.quants.quantize(values, kind).view(np.uint8)
    out = torch.empty(ROWS, COLUMNS)
    dequantise(raw, kind, out)
    assert same(out, reference(raw, kind))


def test_chunks_join_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ITEMS", 1000)
    for kind in (T.Q4_1, T.Q6_K, T.IQ3_S):
        raw = random_blocks(kind, np.random.default_rng(5), rows=11)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(11, COLUMNS, dtype=dtype)
            dequantise(raw, kind, out)
            expected = torch.from_numpy(reference(raw, kind)).to(dtype)
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_types_that_the_reference_cannot_decode_are_refused() -> None:
    refused = [kind for kind in T if kind not in DECODABLE]
    assert T.Q8_K in refused
    for kind in refused:
        with pytest.raises(ModelError, match=rf"tensor x has the type {kind.name}"):
            check_supported(kind, "tensor x")
    for kind in DECODABLE:
        check_supported(kind, "tensor x")


def test_every_type_mixed_in_one_file(tmp_path: Path) -> None:
    """As the MLP tensors of a model with a layer per type: read through the public interface."""
    rng = np.random.default_rng(7)
    metadata = {
        "llama.block_count": len(DECODABLE),
        "llama.context_length": 128,
        "llama.embedding_length": COLUMNS,
        "llama.feed_forward_length": ROWS,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    tensors: dict[str, Any] = {"token_embd.weight": np.zeros((10, COLUMNS), np.float32)}
    blocks = {kind: random_blocks(kind, rng) for kind in DECODABLE}
    plain = {T.F32: np.float32, T.F16: np.float16}
    for index, (kind, raw) in enumerate(blocks.items()):
        given = raw.view(plain[kind]) if kind in plain else (raw, kind)
        tensors[f"blk.{index}.ffn_up.weight"] = given
    files = resolve_model(str(write_gguf(tmp_path / "mixed.gguf", metadata, tensors)))
    weights = open_weights(files)
    for index, (kind, raw) in enumerate(blocks.items()):
        name = f"model.layers.{index}.mlp.up_proj.weight"
        assert weights.shape(name) == (ROWS, COLUMNS)
        assert weights.file_of(name) == files.path
        found = weights.get(name)
        assert found.dtype == {T.F16: torch.float16, T.BF16: torch.bfloat16}.get(kind, torch.float32)
        assert same(found.float(), reference(raw, kind)), kind.name
        rounded = weights.get(name, dtype=torch.bfloat16)
        expected = torch.from_numpy(reference(raw, kind)).to(torch.bfloat16)
        assert torch.equal(rounded.nan_to_num(), expected.nan_to_num())
