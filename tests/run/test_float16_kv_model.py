"""Whole models on a CPU over a float16 KV cache: accuracy, independence of steps, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.paged import PagedDriver
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference

from millrace.models import load
from millrace.models.decoder import Decoder
from millrace.models.spec.families import spec_from_config
from millrace.run.device.kv_pool import resolve_kv_dtype

CPU = torch.device("cpu")
TOKENS = 80


class HalfDriver(PagedDriver):
    """Unwritten items are NaN."""

    def __init__(self, decoder: Decoder, block_size: int = 4) -> None:
        super().__init__(decoder, block_size)
        self.kv = [torch.full_like(kv, float("nan"), dtype=torch.float16) for kv in self.kv]


def decoder_of(case: str) -> Decoder:
    model = make_reference(case)
    source = StateDictSource.of(model)
    return load.build_decoder(spec_from_config(config_of(model)), source, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3_moe"])
def test_logits_are_close_to_those_of_the_full_cache_whatever_the_chunks(case: str) -> None:
    decoder = decoder_of(case)
    tokens = np.random.default_rng(4).integers(0, VOCAB, TOKENS).tolist()
    wide = PagedDriver(decoder).run(0, tokens, TOKENS)
    half = HalfDriver(decoder).run(0, tokens, TOKENS)
    error = (half - wide).norm(dim=1) / wide.norm(dim=1)
    assert 0 < float(error.max()) < 0.01
    assert torch.equal(HalfDriver(decoder).run(0, tokens, 7), half)


def test_auto_is_float16_beside_int8_products_only() -> None:
    spec = decoder_of("llama").spec

    def resolved(dtype: torch.dtype, has_int8_products: bool) -> str:
        return resolve_kv_dtype("auto", spec, dtype=dtype, device=CPU, has_int8_products=has_int8_products)

    assert resolved(torch.float32, True) == "float16"
    assert resolved(torch.float32, False) == "full"
    assert resolved(torch.bfloat16, True) == "full"
