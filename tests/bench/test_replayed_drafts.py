"""`bench speculate --models`: drafts replayed from a first run, spoilt so that each is right as often as wanted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import triton_mode  # noqa: F401  Before anything that imports Triton.

from millrace.bench.errors import BenchError
from millrace.bench.gpu.speculating import (
    SweepPoint,
    SweepSizes,
    decode_rate,
    engine_configs,
    spoilt,
    with_clear_choices,
)
from millrace.config import load_config
from millrace.models.weights.random_weights import RandomWeights
from millrace.params.rows import RowParams
from millrace.params.sampling import SamplingParams
from millrace.plan.step import Admission, StepPlan, exact_shape
from millrace.run.device.device import CpuDevice
from millrace.run.drafting.device_drafts import DeviceDrafts
from millrace.run.drafting.drafter import DraftAsk
from millrace.run.drafting.replay import ReplayDrafter

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


def admission(prompt: list[int], prediction: tuple[int, ...], limit: int, output: tuple[int, ...] = ()) -> Admission:
    params = RowParams(SamplingParams(prediction=prediction), ())
    return Admission(1, 5, np.array([*prompt, *output], np.int32), len(prompt), params, limit)


def test_a_draft_is_right_as_often_as_wanted_given_those_before() -> None:
    rng, tokens = np.random.default_rng(1), list(range(20_000))
    right = np.array(spoilt(tokens, 0.6, 20_001, rng)) == tokens
    assert right.mean() == pytest.approx(0.6, abs=0.02)
    assert right[1:][right[:-1]].mean() == pytest.approx(0.6, abs=0.02)
    assert spoilt(tokens, 1.0, 20_001, rng) == tuple(tokens)
    assert not set(enumerate(spoilt(tokens, 0.0, 20_000, rng))) & set(enumerate(tokens))


def test_drafts_are_found_by_position() -> None:
    drafter = ReplayDrafter()
    drafter.admit(admission([7, 8], (10, 11, 12, 13), 6))
    known = np.array([7, 8, 10, 99], np.int32)
    (drafts,) = drafter.propose([DraftAsk(1, known, 2, 5)])
    assert drafts.tolist() == [12, 13]


def test_a_gpu_holds_them_behind_the_known_tokens() -> None:
    """Also after a preemption, and not beyond the limit."""
    drafts = DeviceDrafts(CpuDevice(1), max_rows=3, max_context=9, vocab_size=100, speculate="replay")
    given = admission([7, 8], (10, 11, 12, 13), 5, output=(20,))
    none, one = np.zeros(0, np.int32), np.ones(1, np.int32)
    plan = StepPlan(0, one, one, one, np.ones(1, np.bool_), none, none, none, exact_shape(one), admitted=(given,))
    drafts.admit(plan)
    assert drafts.columns.holds_drafts
    assert drafts.columns.history[1, :6].tolist() == [7, 8, 20, 11, 12, 0]
    assert int(drafts.columns.known[1]) == 3


def test_the_rate_counts_while_all_rows_decode() -> None:
    assert decode_rate([[0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 2.0, 2.5, 3.0]]) == pytest.approx((2 + 4) / 2)
    with pytest.raises(BenchError, match="raise --tokens"):
        decode_rate([[0.0, 1.0], [1.0, 2.0]])


def test_what_the_controller_must_reach() -> None:
    rates = {"off": [100.0, 50.0], "1": [150.0, 75.0], "3": [200.0, 100.0]}
    assert not SweepPoint(1, 0.8, {**rates, "auto": [192.0, 96.0]}).failures
    assert SweepPoint(1, 0.8, {**rates, "auto": [180.0, 90.0]}).failures == ["auto is 0.900 of the best"]
    slow = SweepPoint(1, 0.0, {"off": [100.0], "1": [90.0], "auto": [96.0]})
    assert slow.best_fixed == "1"
    assert slow.failures == ["auto is 0.960 of off"]


def test_engines_differ_only_in_their_drafts(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(SHAPE), encoding="utf-8")
    config = load_config(None, {"model.source": f"random:{file}"}).config
    engines = engine_configs(with_clear_choices(config, tmp_path), SweepSizes(lengths=(2,)))
    found = {name: (own.plan.speculate, own.plan.draft_tokens) for name, own in engines.items()}
    assert found == {"off": ("off", 0), "auto": ("replay", 0), "2": ("replay", 2)}
    assert len({(own.model.source, own.memory.kv_tokens) for own in engines.values()}) == 1
    written = Path(engines["off"].model.source.removeprefix("random:"))
    weights = RandomWeights(written, json.loads(written.read_text(encoding="utf-8")), 0)
    added, other = (weights.get(f"model.layers.0.{name}.weight") for name in ("mlp.down_proj", "mlp.up_proj"))
    assert 0 < float(added.abs().max()) < 1e-6 < 0.01 < float(other.abs().mean())
    assert torch.isfinite(added).all()
