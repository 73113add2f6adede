"""Linears that add their result to the residual: the same logits in every family, for all tokens of a step, for the
last ones, and in steps with too few rows to add."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.paged import PagedDriver, make_batch
from helpers.tiny_models import VOCAB, StateDictSource, config_of, make_reference
from torch import Tensor

from millrace.models import builder, load
from millrace.models.batch import DrawnStates, LastTokens
from millrace.models.decoder import Decoder
from millrace.models.spec.families import spec_from_config
from millrace.ops import registry
from millrace.ops.base.version import Choice, Version
from millrace.ops.linear import dense as linear

CPU = torch.device("cpu")
MIN_ROWS_TO_ADD = 4
"""Minimum rows for which the linears of these tests add."""


@pytest.fixture
def added_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Build decoders with the GPU's linear, which here adds for few rows already; records the rows of each call."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -r requirements-dev.txt")
    from millrace.ops.triton.gemm.choice import NO_TILES

    calls: list[int] = []

    class Counted(linear.TunedLinear):
        def add_to(self, x: Tensor, total: Tensor) -> None:
            calls.append(len(x))
            super().add_to(x, total)

    tuned = Version("linear", "tuned", lambda weight, bias=None: Counted(weight, bias, NO_TILES), "in this test")

    def choose(op: str, *args: Any, **shape: Any) -> Choice:
        return Choice(tuned, ()) if op == "linear" else registry.choose(op, *args, **shape)

    monkeypatch.setattr(linear, "MIN_ROWS_TO_ADD", MIN_ROWS_TO_ADD)
    monkeypatch.setattr(builder, "choose", choose)
    return calls


def make(case: str) -> tuple[torch.nn.Module, Decoder]:
    model = make_reference(case)
    spec = spec_from_config(config_of(model))
    return model, load.build_decoder(spec, StateDictSource.of(model), device=CPU, dtype=torch.float32)


ADDED = {
    "llama": (True, True), "smollm3": (True, True), "qwen3_bias_tied": (False, True), "llama_bias": (False, False),
    "gemma2": (False, False), "qwen3_moe": (True, False),
}  # fmt: skip
"""True where attention output and MLP output are added by the linear: not with a bias, an output norm or experts."""


@pytest.mark.parametrize("case", ADDED)
def test_logits_are_the_same(case: str, added_rows: list[int]) -> None:
    model, decoder = make(case)
    tokens = random.Random(0).choices(range(VOCAB), k=23)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    for chunk in (23, 7, 3):
        added_rows.clear()
        ours = PagedDriver(decoder, block_size=4).run(0, tokens, chunk)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        steps = [len(tokens[at : at + chunk]) for at in range(0, len(tokens), chunk)]
        attention, mlp = ADDED[case]
        layers = len(decoder.spec.layers)
        per_step = attention * layers + mlp * (layers - 1)  # The last layer's output goes to the final norm.
        assert sorted(added_rows) == sorted(rows for rows in steps if rows >= MIN_ROWS_TO_ADD for _ in range(per_step))


@pytest.mark.parametrize("count", [2, 6])
def test_when_only_some_tokens_are_needed(count: int, added_rows: list[int]) -> None:
    """As `last` tokens or as `drawn` states; fewer than the linears need to add, or more."""
    _, decoder = make("llama")
    rows = [(random.Random(row).choices(range(VOCAB), k=3), 0, [row + 1]) for row in range(count)]
    kv = PagedDriver(decoder, block_size=4).kv
    batch = make_batch(rows, 4)
    wanted = decoder.forward(batch, kv)[2::3]
    index = torch.arange(2, 3 * count, 3)
    batch.drawn = DrawnStates(index, torch.full((count, decoder.spec.hidden_size), float("nan")))
    torch.testing.assert_close(decoder.forward(batch, kv), wanted)
    batch.drawn = None
    starts = list(range(count + 1))
    query_starts = torch.tensor(starts, dtype=torch.int32)
    batch.last = LastTokens(index, replace(batch.rows, query_starts=query_starts, query_starts_host=starts))
    added_rows.clear()
    torch.testing.assert_close(decoder.forward(batch, kv), wanted, atol=1e-5, rtol=1e-5)
    assert (count in added_rows) == (count >= MIN_ROWS_TO_ADD)
    assert added_rows.count(3 * count) == 2 * len(decoder.spec.layers) - 2


def test_the_embedding_is_not_changed(added_rows: list[int]) -> None:
    _, decoder = make("llama_tied")
    tokens = random.Random(0).choices(range(VOCAB), k=12)
    first, second = (PagedDriver(decoder, block_size=4).run(0, tokens, 12) for _ in range(2))
    assert added_rows
    assert torch.equal(first, second)
