"""The decoder on CUDA: logits of every family, and no host synchronisation in a forward pass."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.paged import PagedDriver, make_grouped_batch
from helpers.tiny_models import CASES, VOCAB, StateDictSource, config_of, make_reference

from millrace.models.decoder import Decoder
from millrace.models.load import build_decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops.linear import dense as linear

pytestmark = pytest.mark.gpu


def load(case: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Decoder]:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    return model, build_decoder(spec, StateDictSource.of(model), device=torch.device("cuda"), dtype=dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.08)])
def test_logits(case: str, dtype: torch.dtype, tolerance: float) -> None:
    model, decoder = load(case, dtype)
    tokens = random.Random(0).choices(range(VOCAB), k=33)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    for chunk in (33, 1, 7):
        ours = PagedDriver(decoder, block_size=4).run(0, tokens, chunk).cpu()
        errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert errors.median() < tolerance


@pytest.mark.parametrize("case", CASES)
def test_logits_with_linears_that_add(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS_TO_ADD", 5)
    test_logits(case, torch.bfloat16, 0.08)


@pytest.mark.parametrize("case", CASES)
def test_forward_never_waits_for_the_device(case: str) -> None:
    _, decoder = load(case, torch.bfloat16)
    driver = PagedDriver(decoder, block_size=4)
    rows = [(list(range(9)), 0, [1, 2, 3]), ([5], 4, [4, 5]), ([6], 7, [6, 7]), ([7, 8], 2, [8])]
    num_groups = decoder.spec.kv_groups.num_groups
    grouped = [(tokens, computed, [blocks] * num_groups) for tokens, computed, blocks in rows]
    batch = make_grouped_batch(grouped, 4, decoder.device)
    driver.add_states(batch, [computed for _, computed, _ in rows], range(len(rows)))
    decoder.forward(batch, driver.kv)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.logits(decoder.forward(batch, driver.kv))
    finally:
        torch.cuda.set_sync_debug_mode("default")
