"""A model split over ranks on a GPU host: every answer is that of one rank, and a lost rank ends the engine.

With one GPU the ranks share it and sum through host memory; with two or more they have one each, and sum through NCCL.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engine_stats import stats_after
from helpers.inside import client_of
from helpers.mixed_requests import MIXED_SETTINGS, mixed_requests
from helpers.served import wait_until
from helpers.tiny_server import CONFIG

from millrace import LLM, SamplingParams
from millrace.engine.ranks.group import RankGroup
from millrace.errors import EngineUnavailable, RequestFailed
from millrace.plan.queue.admission_forecast import AdmissionForecast

pytestmark = [pytest.mark.gpu, pytest.mark.live, pytest.mark.timeout(900)]

TINY = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
DEFAULT = CONFIG | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
QWEN3 = DEFAULT | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MOE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def source_of(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"random:{folder / 'config.json'}"


def prompts_of(vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(4)
    return [draw.integers(300, vocab_size, length).tolist() for length in (3, 900, 17, 40, 128, 9)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("config", [DEFAULT, QWEN3, MOE], ids=["default", "qwen3-0.6b", "moe"])
def test_tokens_are_those_of_one_rank(config: dict[str, Any], graphs: bool, tmp_path: Path) -> None:
    """Whole prompts and chunks, alone and together, from the prefix cache the second time."""
    found = []
    settings: dict[str, Any] = {"dtype": "float32", "kv_tokens": 8000, "token_budget": 512, "max_running": 8}
    for num_ranks in (1, 2):
        options = settings | {"graphs": graphs, "tensor_parallel": num_ranks, "speculate": "off"}
        with LLM(source_of(config, tmp_path), device="cuda", **options) as llm:
            prompts = prompts_of(config["vocab_size"])
            alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:2]]
            together = [[one.token_ids for one in llm.generate(prompts, GREEDY)] for _ in range(2)]
            found.append((alone, together))
    assert found[1] == found[0]


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_a_mixed_load_gives_the_tokens_of_one_rank(
    speculate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Drafts, grammars, prefix hits, host memory, preemption and vectors."""
    monkeypatch.setattr(AdmissionForecast, "admit", lambda *_: True)
    prompts, params = mixed_requests(TINY["vocab_size"])
    own = {"dtype": "float32", "speculate": speculate, "block_size": 16, "token_budget": 64, "kv_tokens": 320}
    found, vectors = [], []
    for num_ranks in (1, 2):
        with LLM(source_of(TINY, tmp_path), device="cuda", tensor_parallel=num_ranks, **(MIXED_SETTINGS | own)) as llm:
            found.append([[one.token_ids for one in llm.generate(prompts, params)] for _ in range(2)])
            vectors.append(np.stack(llm.embed(prompts[:3])))
            stats = stats_after(llm, 2 * len(prompts) + 3)
    assert found[1] == found[0]
    assert vectors[1] == pytest.approx(vectors[0], abs=1e-4)
    met = (stats.preemptions, stats.prefix_hit_tokens, stats.host_tokens_loaded)
    assert all(met), met
    assert stats.accepted_tokens or speculate == "off"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_step_in_flight_does_not_wait_for_a_lost_rank(
    sign: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[RankGroup] = []
    create = RankGroup.__init__

    def watched(self: RankGroup, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        started.append(self)

    monkeypatch.setattr(RankGroup, "__init__", watched)
    settings: dict[str, Any] = {"dtype": "float32", "kv_tokens": 8000, "speculate": "off"}
    with LLM(source_of(TINY, tmp_path), device="cuda", tensor_parallel=2, **settings) as llm:
        assert len(llm.generate([[301, 302]], GREEDY)[0].token_ids) == 24
        os.kill(started[0].pids[0], sign)
        with pytest.raises((EngineUnavailable, RequestFailed), match="Rank 1 of 2 has"):
            llm.generate([[301, 302]], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
        wait_until(lambda: client_of(llm).failure is not None, "the engine's end")


def test_what_does_not_go_with_ranks_on_a_gpu_is_refused(tmp_path: Path) -> None:
    source = source_of(TINY, tmp_path)
    with pytest.raises(EngineUnavailable, match="drafts from text alone so far"):
        LLM(source, device="cuda", tensor_parallel=2, speculate="draft", drafter=source, kv_tokens=2000).__enter__()
