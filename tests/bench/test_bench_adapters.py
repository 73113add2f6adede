"""`millrace bench adapters`: what steps with adapters cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from millrace.bench.micro.adapters import ALL, Q_AND_V, Case, adapter_figures
from millrace.config import Config, ModelConfig, RunConfig
from millrace.plan.step import StepPlan
from millrace.run.runner import Runner

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
CASES = (Case("4 rows", 4, 20, 1, (1, 3), 2, ((Q_AND_V, 1.15),)), Case("prompt", 1, 0, 30, (1,), 1, ()))


def test_each_case_runs_with_as_many_adapters_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = Config(
        model=ModelConfig(source=f"random:{tmp_path / 'config.json'}"), run=RunConfig(device="cpu", threads=1)
    )
    seen: set[tuple[int, int, int]] = set()
    execute = Runner.execute

    # Counts what the runner does itself: figures do not show it.
    def counted(self: Runner, plan: StepPlan, *rest: object) -> object:
        result = execute(self, plan, *rest)
        slots = self.table.adapters[plan.rows]
        assert (plan.shape.key > 0) == bool(slots.any())
        seen.add((len(plan.rows), int(plan.counts[0]), len(np.unique(slots[slots > 0]))))
        return result

    monkeypatch.setattr(Runner, "execute", counted)
    figures = list(adapter_figures(config, CASES, rounds=2))
    assert seen == {(4, 1, 0), (4, 1, 1), (4, 1, 3), (1, 30, 0), (1, 30, 1)}
    names = [f"{case.name}, {targets}" for targets in (Q_AND_V, ALL) for case in CASES]
    assert list(dict.fromkeys(figure.workload for figure in figures)) == names
    first = [figure.metric for figure in figures if figure.workload == names[0]]
    assert first == ["base", "1 adapter", "1 adapter / base", "3 adapters", "3 adapters / base"]
    assert all(figure.value > 0 for figure in figures)
    assert [figure.note.endswith("; bar 1.15") for figure in figures if "/" in figure.metric][:3] == [True, True, False]
