"""Attention by one kernel within all texts, which a GPU has, gives what attention by length gives."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_encoders import save_encoder
from torch import Tensor

from millrace.models.encoders.encoder import Encoder, pack
from millrace.models.encoders.load import load_encoder
from millrace.run.device.device import CpuDevice, CudaDevice
from millrace.run.graphs.encoder_graphs import EncoderGraphs, EncodeSize
from millrace.run.graphs.graph_cache import Captured, GraphCache, Work
from millrace.sources.resolve import resolve_model

TEXTS = [[2, 5, 6, 7, 3], [2, *range(10, 60), 3], [2, 9, 3], [2, 40, 3]]
CASES = ["bert", "modernbert", "nomic_bert"]


def vectors(folder: Path, device: str, dtype: torch.dtype) -> list[Tensor]:
    loaded = load_encoder(resolve_model(str(folder)), device=torch.device(device), dtype=dtype)
    packed, order = pack(TEXTS, [0] * len(TEXTS), [0] * len(TEXTS))
    found = dict(zip(order, loaded.head(loaded.encoder(packed), packed), strict=True))
    return [found[index].float().cpu() for index in range(len(TEXTS))]


def attention(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *given: object, window_size: object) -> Tensor:
    """What the kernel does, text by text."""
    assert isinstance(window_size, tuple)
    out = torch.empty_like(query)
    for first, last in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        at = torch.arange(last - first)
        near = (at[None, :] - at[:, None]).abs() <= (window_size[0] if window_size[0] >= 0 else last)
        own = (one[first:last].transpose(0, 1) for one in (query, key, value))
        out[first:last] = F.scaled_dot_product_attention(*own, attn_mask=near).transpose(0, 1)
    return out


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gets_the_texts_and_the_window(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_encoder(tmp_path / "m", case)
    expected = vectors(folder, "cpu", torch.float32)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=attention))
    monkeypatch.setattr(Encoder, "packs", True)
    for own, other in zip(vectors(folder, "cpu", torch.float32), expected, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4)


def test_steps_of_recurring_sizes_replay_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph runs what was captured on whatever the buffers hold then, so the fake one runs its work again."""
    loaded = load_encoder(
        resolve_model(str(save_encoder(tmp_path / "m", "modernbert"))), device=torch.device("cpu"), dtype=torch.float32
    )
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=attention))
    steps = [TEXTS, TEXTS[::-1], [[2, 8, 9, 3]] * 3, [[2, *range(20, 50), 3]], [[2, *range(6, 40), 3]]]
    steps.append([TEXTS[1], *TEXTS[:1] * 5])
    captured: list[object] = []

    def capture(cache: GraphCache, key: object, work: Work) -> Captured:
        captured.append(key)
        cache.captured[key] = Captured(SimpleNamespace(replay=work), work())  # type: ignore[arg-type]
        return cache.captured[key]

    monkeypatch.setattr(GraphCache, "capture", capture)
    graphs = EncoderGraphs(loaded.encoder, CpuDevice(torch.get_num_threads()), max_tokens=90, max_texts=6)
    graphs.graphs.is_capturing = True
    for texts in [*steps, *steps]:
        packed, _ = pack(texts, [0] * len(texts), [0] * len(texts))
        assert graphs.fits(packed)
        found = graphs.states(packed)
        torch.testing.assert_close(found, loaded.encoder(packed), atol=2e-5, rtol=1e-4)
    assert EncodeSize(90, 8, 128) in captured  # The largest size is no power of two.
    assert len(captured) == len({EncodeSize.of(pack(texts, [0] * 9, [0] * 9)[0], 90) for texts in steps})
    too_many, _ = pack([[2] * 91], [0], [0])
    assert not graphs.fits(too_many)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_what_uncaptured_steps_give(case: str, tmp_path: Path) -> None:
    folder, device = save_encoder(tmp_path / "m", case, hidden_size=64), CudaDevice()
    loaded = load_encoder(resolve_model(str(folder)), device=device.torch_device, dtype=torch.float16)
    graphs = EncoderGraphs(loaded.encoder, device, max_tokens=128, max_texts=8)
    with torch.inference_mode():
        for texts in [TEXTS, TEXTS[:1], TEXTS[2:], [[2, 8, 9, 3]] * 3] * 3:
            packed, _ = pack(texts, [0] * len(texts), [0] * len(texts))
            found, expected = graphs.states(packed).float(), loaded.encoder(packed).float()
            assert F.cosine_similarity(found, expected, dim=1).min() > 0.999
    assert graphs.graphs.is_capturing
    assert len(graphs.graphs.captured) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_what_the_cpu_gives(case: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "m", case, hidden_size=64)
    for own, other in zip(vectors(folder, "cuda", torch.float16), vectors(folder, "cpu", torch.float32), strict=True):
        assert F.cosine_similarity(own, other, dim=0) > 0.999
